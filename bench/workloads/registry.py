"""The workloads by name."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

import bench
from bench.config import Endpoint, WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Words, Workload
from bench.workloads.length_traces import length_trace
from bench.workloads.mooncake import mooncake
from bench.workloads.multi_turn import multi_turn
from bench.workloads.random import random
from bench.workloads.shared_prefix import shared_prefix
from bench.workloads.sharegpt import sharegpt
from bench.workloads.sonnet import sonnet

SAMPLES = Path(bench.__file__).parent / "samples"


class WorkloadKind(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and what its users need not say."""

    conversations: Workload
    help: str  # one line
    timed: bool = False  # its data have timestamps: it is replayed with them unless another arrival is asked for
    endpoint: Endpoint = "completions"  # which it is sent to by default
    sample: str = ""  # file in SAMPLES that is read when no data are named; empty: reads none


WORKLOADS: dict[str, WorkloadKind] = {
    "random": WorkloadKind(conversations=random, help="Prompts of random words; lengths from distributions."),
    "shared-prefix": WorkloadKind(conversations=shared_prefix, help="Groups of prompts that begin with one prefix."),
    "multi-turn": WorkloadKind(
        conversations=multi_turn, help="Chats whose history grows, with time to think.", endpoint="chat"
    ),
    "sonnet": WorkloadKind(
        conversations=sonnet, help="Lines of Shakespeare's sonnets in random order.", sample="sonnets.txt"
    ),
    "sharegpt": WorkloadKind(
        conversations=sharegpt, help="Chats from a ShareGPT file.", endpoint="chat", sample="conversations.json"
    ),
    "mooncake": WorkloadKind(
        conversations=mooncake,
        help="Mooncake trace: timestamps, lengths and shared prefixes.",
        timed=True,
        sample="mooncake_sample.jsonl",
    ),
    "azure": WorkloadKind(
        conversations=length_trace,
        help="Azure LLM inference trace of 2023 or 2024: timestamps and lengths.",
        timed=True,
        sample="azure_sample.csv",
    ),
    "burstgpt": WorkloadKind(
        conversations=length_trace,
        help="BurstGPT trace: timestamps and lengths.",
        timed=True,
        sample="burstgpt_sample.csv",
    ),
    "lengths": WorkloadKind(
        conversations=length_trace,
        help="CSV table of input and output lengths, with timestamps or without.",
        sample="lengths_sample.csv",
    ),
}


def kind_of(name: str) -> WorkloadKind:
    """The workload of that name. Raises BenchError that lists those there are."""
    if name not in WORKLOADS:
        raise BenchError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def workload(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """Conversations of the workload that `config` names, from its sample if no data are named. Raises BenchError."""
    kind = kind_of(config.name)
    if kind.sample and not config.data:
        config = msgspec.structs.replace(config, data=str(SAMPLES / kind.sample))
    return kind.conversations(config, seed, words)
