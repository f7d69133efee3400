"""What is sent when: conversations of the workload with their start times, and the manners of their clients."""

from collections.abc import Iterator
from itertools import repeat

import msgspec
import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.load.answer import Manner
from bench.load.arrivals import arrival_times
from bench.workloads.base import Conversation, Words
from bench.workloads.lengths import parse_length
from bench.workloads.mix import parse_mix
from bench.workloads.registry import workload

_STREAM = 0xC11E  # keeps the draws of clients apart from others with the same seed
_CANCEL_WITHIN = 0.2  # seconds after which a cancelling client has hung up, at the latest


class Planned(msgspec.Struct, kw_only=True):
    """A conversation to come."""

    number: int
    first_id: int  # of its first request; the others follow
    due: float | None  # seconds since the start of the run; None: as soon as there is room (closed loop)
    conversation: Conversation
    client: str
    manner: Manner


def plan(config: LoadConfig, words: Words) -> Iterator[Planned]:
    """The whole run, the same one for the same configuration. Raises BenchError."""
    next_id = 0
    mix = parse_mix(config.workload.mix)
    patience = parse_length(config.workload.leave_after)
    conversations = workload(config.workload, config.seed, words)
    starts = repeat(None) if config.concurrency is not None or config.replays else arrival_times(config)
    for number, (conversation, start) in enumerate(zip(conversations, starts, strict=False)):
        due = start
        if config.replays:
            due = conversation.at
            if due is None:
                raise BenchError("this workload has no timestamps to replay: choose --rate or --concurrency")
        if due is not None and config.duration is not None and due >= config.duration:
            return
        if config.num_requests is not None:
            conversation.turns = conversation.turns[: config.num_requests - next_id]
            if not conversation.turns:
                return
        rng = np.random.default_rng((config.seed, _STREAM, number))
        client = mix.client(rng)
        yield Planned(
            number=number,
            first_id=next_id,
            due=due,
            conversation=conversation,
            client=client,
            manner=_manner(client, config, patience.sample(rng), float(rng.uniform(0.001, _CANCEL_WITHIN))),
        )
        next_id += len(conversation.turns)


def count(config: LoadConfig, words: Words) -> int:
    """Requests of the run; 0 when only its duration bounds them."""
    if config.replays:
        return sum(len(planned.conversation.turns) for planned in plan(config, words))
    return config.num_requests or 0


def _manner(client: str, config: LoadConfig, chunks: int, seconds: float) -> Manner:
    match client:
        case "slow":
            return Manner(bytes_per_second=config.workload.slow_rate)
        case "disconnect":
            return Manner(leave_after_chunks=chunks)
        case "cancel":
            return Manner(leave_after_chunks=1, leave_after_seconds=seconds)
        case "bad":
            return Manner(expects_refusal=True)
    return Manner()
