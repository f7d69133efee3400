"""What is replayed: requests with times, lengths and the chained hashes of their blocks.

A trace is a file in Mooncake's format, or generated: `tool_agent`. Times of a trace without a fine clock are spread
over its ticks (`bench.workloads.trace_time`). A prompt that begins with all full blocks of an earlier one, and has
room for its answer, goes on with that conversation: however fast the trace is replayed, it is not sent before the
earlier one is answered.
"""

import os
from pathlib import Path

import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.replay.tool_agent import tool_agent
from bench.workloads.lengths import LONGEST
from bench.workloads.mooncake import TraceRequest, read_mooncake
from bench.workloads.trace_time import schedule
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE

TRACES_VARIABLE = "TANDEM_TRACES"
_OWN_BLOCKS = 2  # a shorter prompt is a common beginning and no conversation to go on with
GENERATED = {"tool_agent": tool_agent}


def load_trace(name: str, folder: str | None, *, limit: int, seed: int) -> Trace:
    """The first `limit` requests (0: all) of a generated trace, of the file `name`, or of `name`.jsonl in `folder`.

    Raises BenchError.
    """
    if name in GENERATED:
        requests = GENERATED[name](seed)
    else:
        requests = read_mooncake(_find(name, folder or os.environ.get(TRACES_VARIABLE)))
    timestamps = np.array([request.timestamp for request in requests]) / 1e3
    rows, times = schedule(timestamps, WorkloadConfig(limit=limit), seed)
    chains = _Chains()
    demands = [chains.demand(requests[row]) for row in rows.tolist()]
    return Trace(Path(name).stem, demands, times)


def _find(name: str, folder: str | None) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if folder is None:
        raise BenchError(
            f"no trace {name!r}: name a file, one of {', '.join(GENERATED)}, "
            f"or set --folder or {TRACES_VARIABLE} to where {name}.jsonl lies"
        )
    found = Path(folder) / f"{name}.jsonl"
    if not found.is_file():
        there = sorted(path.stem for path in Path(folder).glob("*.jsonl")) if Path(folder).is_dir() else []
        raise BenchError(f"{found} is missing; there are {', '.join([*GENERATED, *there])}")
    return found


class _Chains:
    """Hash ids to chained hashes: the same id behind another prefix is another block."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._count = 0
        self._demands = 0
        self._ends: dict[bytes, tuple[int, int]] = {}  # last full block of a prompt: request, tokens with its answer

    def demand(self, request: TraceRequest) -> Demand:
        """Blocks whose ids the trace does not tell, those of most answers, are nobody else's."""
        prompt_ids = -(-request.input_length // BLOCK_SIZE)
        output_tokens = max(1, request.output_length)
        if request.input_length + output_tokens > LONGEST:
            raise BenchError(f"a request of the trace has more than {LONGEST} tokens")
        blocks = (request.input_length + output_tokens) // BLOCK_SIZE
        # Ids beyond the prompt's are the answer's; otherwise the last one is of a block that is not full.
        told = len(request.hash_ids) if len(request.hash_ids) > prompt_ids else request.input_length // BLOCK_SIZE
        node, hashes = 0, []
        for hash_id in request.hash_ids[: min(told, blocks)]:
            node = self._child(node, hash_id)
            hashes.append(node.to_bytes(16, "little"))
        while len(hashes) < blocks:
            self._count += 1
            hashes.append(self._count.to_bytes(16, "little"))
        prompt = hashes[: request.input_length // BLOCK_SIZE]
        follows = self._before(request.input_length, prompt)
        if len(prompt) >= _OWN_BLOCKS:
            self._ends[prompt[-1]] = self._demands, request.input_length + output_tokens
        self._demands += 1
        return Demand(request.input_length, output_tokens, hashes, follows)

    def _before(self, tokens: int, prompt: list[bytes]) -> int | None:
        """The request that this one goes on with. Of those that begin alike only one can be."""
        found = next((each for each in reversed(prompt) if each in self._ends), None)
        if found is None or self._ends[found][1] > tokens:
            return None
        return self._ends.pop(found)[0]

    def _child(self, node: int, hash_id: int) -> int:
        child = self._nodes.get((node, hash_id))
        if child is None:
            self._count += 1
            child = self._nodes[node, hash_id] = self._count
        return child
