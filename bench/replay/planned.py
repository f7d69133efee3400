"""A load run as a simulated cluster is asked for it: what `bench.load` would send, as lengths and hashes of blocks.

Of a text nothing counts but which part of it is the same as another's, and recipes tell that: equal seeds are equal
text. Answers are nobody else's.
"""

import math
from collections.abc import Iterator

import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.load.plan import plan
from bench.workloads.base import Synthetic, Text
from bench.workloads.lengths import LONGEST
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE

_ENDLESS = 10_000_000  # requests; a run that nothing bounds is a mistake

Part = tuple[tuple[object, ...], int]  # what names a text, and its tokens


class NoWords:
    """Recipes are not made into text here."""

    overhead = 0

    def render(self, text: Text) -> str:
        """Raises BenchError."""
        raise BenchError("this workload has texts of its own: simulate one of lengths, such as random or mooncake")

    def count(self, text: str) -> int:
        """Raises BenchError."""
        raise BenchError("this workload has texts of its own: simulate one of lengths, such as random or mooncake")


def planned_trace(config: LoadConfig) -> Trace:
    """All requests of an open loop. Raises BenchError for a closed one, and for workloads of texts.

    Questions of one conversation follow each other; each has the system prompt and all that was said before.
    """
    if config.concurrency is not None:
        raise BenchError("a simulation has an open loop: give --rate, or replay a trace's own times")
    come = math.inf if config.num_requests is None else float(config.num_requests)
    if config.rate is not None and config.duration is not None:
        come = min(come, max(config.rate, config.ramp_to or 0.0) / 2 * config.duration)  # at least, in the mean
    if _ENDLESS < come < math.inf:
        raise BenchError(f"{come:.3g} requests are more than the {_ENDLESS} that a run may have: lower what says so")
    chains, demands, times = _Chains(), list[Demand](), list[float]()
    for planned in plan(config, NoWords()):
        assert planned.due is not None
        said = _parts(planned.conversation.system)
        for number, turn in enumerate(planned.conversation.turns):
            if not turn.output_tokens:
                raise BenchError("this workload does not say how long answers are: give --output-len")
            said += _parts(turn.text)
            tokens = sum(count for _, count in said)
            if tokens > LONGEST:
                raise BenchError(f"a prompt of {tokens:.3g} tokens is longer than the {LONGEST} that there may be")
            answer = ("answer", planned.number, number), turn.output_tokens
            hashes = list(chains.hashes([*said, answer]))
            follows = len(demands) - 1 if number else None
            demands.append(Demand(tokens, turn.output_tokens, hashes, follows, turn.think))
            times.append(planned.due)
            said.append(answer)
            if len(demands) > _ENDLESS:
                raise BenchError("this is no bounded run: give --duration or --num-requests")
    if not demands:
        raise BenchError("there is no request in this run: raise --rate or --duration")
    return Trace(config.workload.name, demands, np.array(times))


def _parts(text: Text) -> list[Part]:
    if not all(isinstance(part, Synthetic) for part in text):
        NoWords().render(text)
    return [(part.seed, part.tokens) for part in text if isinstance(part, Synthetic) and part.tokens]


class _Chains:
    """Hashes of full blocks: equal for equal text behind equal blocks."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, tuple[tuple[object, int, int], ...]], int] = {}

    def hashes(self, parts: list[Part]) -> Iterator[bytes]:
        """Of the blocks that the parts fill one after another."""
        node, block, room = 0, list[tuple[object, int, int]](), BLOCK_SIZE
        for name, tokens in parts:
            start = 0
            while start < tokens:
                count = min(room, tokens - start)
                block.append((name, start, count))
                start, room = start + count, room - count
                if not room:
                    node = self._nodes.setdefault((node, tuple(block)), len(self._nodes) + 1)
                    yield node.to_bytes(16, "little")
                    block, room = [], BLOCK_SIZE
