"""What policies of tiers keep of a trace, against an optimum: `python -m bench.tier_policies --json F`.

One tier of `kv_transfer.tiers`, its policies' own code, without bytes. For each request of a trace in turn: leading
blocks of the prompt that are there are hits, and all its other blocks, with those of the answer, are offered to the
tier as they would be behind a worker. With --front the tier lies behind a worker's own cache, an LRU of so many times
its size: what hits there never reaches the tier, and everything computed does. A working set of 2 means that the trace
has twice as many distinct blocks as the tier has room for.

`optimum` is Belady's: of what is there and what comes goes the block whose next use is farthest away, or that has
none; of one prompt the last one. A block is asked for only with all before it, so the optimum for single blocks is that
for prompts. It sees the whole trace; nobody can do better. It is not told where there is a front, as then what reaches
the tier depends on what it kept.

Prompts' tokens that hit are counted in all tokens of prompts, those of the front with them. `saved`: of the seconds in
which an 8B Llama shape on an H200 would compute all prompts (`planner.simulator.timing`). `writes`: blocks that were
stored, of those offered.
"""

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from bench.errors import BenchError
from bench.provenance import report
from bench.replay.traces import GENERATED, TRACES_VARIABLE, load_trace
from kv_transfer.tiers.policies import POLICIES
from kv_transfer.tiers.policies.base import Arrival, Policy
from kv_transfer.tiers.policies.ranking import Ranking
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.timing import Timing

OPTIMUM = "optimum"
_HEAD = "| working set | policy | hit rate, % | of which front, % | saved, % | writes, % |\n|---|---|---|---|---|---|"
_LONGEST = 1 << 20  # blocks of a prompt, more than there are
_CHUNK = 8192  # tokens of a prompt that are computed in a step
_ENGINE_BLOCKS = BLOCK_SIZE // 16  # blocks of an engine in one of a trace


class Cache(Protocol):
    """What keeps blocks."""

    writes: int

    def leading(self, hashes: list[bytes], start: int) -> int:
        """How many leading blocks are there, if the first `start` are; the others are used now."""
        ...

    def offer(self, hashes: list[bytes], start: int) -> None:
        """Blocks of a prompt from `start` on were computed, or found elsewhere."""
        ...


class Tier:
    """A policy and the blocks that it keeps, as `kv_transfer.tiers.disk` plans its slots."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._there: set[bytes] = set()
        self.writes = 0

    def leading(self, hashes: list[bytes], start: int) -> int:
        """Tails are used first, so that heads are the latest."""
        count = start
        while count < len(hashes) and hashes[count] in self._there:
            count += 1
        for block_hash in reversed(hashes[start:count]):
            self._policy.touch(block_hash)
        return count

    def offer(self, hashes: list[bytes], start: int) -> None:
        """Heads get room first, and none of them goes for what comes behind it."""
        heads = set(hashes[:start])
        stored = []
        for at, block_hash in enumerate(hashes[start:], start):
            heads.add(block_hash)
            if block_hash in self._there:
                continue
            arrival = Arrival(block_hash, at * _ENGINE_BLOCKS, hashes[at - 1] if at else b"")
            if not self._policy.admits(arrival):
                continue
            if len(self._there) >= self._capacity:
                victim = self._policy.evict(arrival, lambda key: key in heads)
                if victim is None:
                    continue
                self._there.remove(victim)
            self._there.add(block_hash)
            stored.append(arrival)
        for arrival in reversed([each for each in stored if each.key in self._there]):
            self._policy.insert(arrival)
        self.writes += len(stored)


class Optimum:
    """Knows when each block is asked for next."""

    def __init__(self, demands: list[Demand], capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[bytes, list[int]] = {}
        for number in reversed(range(len(demands))):
            for block_hash in asked(demands[number]):
                self._uses.setdefault(block_hash, []).append(number)
        self._there = Ranking()  # by minus the next use, of one prompt tails before heads
        self._now = 0
        self.writes = 0

    def leading(self, hashes: list[bytes], start: int) -> int:
        """One request later."""
        count = next((at for at, each in enumerate(hashes) if each not in self._there), len(hashes))
        for block_hash in hashes:
            self._uses[block_hash].pop()
        self._now += 1
        for at in range(count):
            self._rank(hashes, at)
        return count

    def offer(self, hashes: list[bytes], start: int) -> None:
        """Takes what is asked for before something that is there is."""
        for at in range(start, len(hashes)):
            if hashes[at] in self._there or not self._uses.get(hashes[at]):
                continue
            if len(self._there) >= self._capacity:
                worst = self._there.pop(lambda key: False)
                if worst is not None and worst[1] >= self._value(hashes, at):
                    self._there.set(*worst)
                    continue
            self._rank(hashes, at)
            self.writes += 1

    def _value(self, hashes: list[bytes], at: int) -> float:
        """Blocks of one next use are of one prompt: the last of them is of no use without the others."""
        return -(self._uses[hashes[at]][-1] + at / _LONGEST)

    def _rank(self, hashes: list[bytes], at: int) -> None:
        if self._uses[hashes[at]]:
            self._there.set(hashes[at], self._value(hashes, at))
        else:
            self._there.remove(hashes[at])


class Front:
    """A worker's own cache: an LRU, in which heads are later than tails."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = capacity

    def leading(self, hashes: list[bytes]) -> int:
        """How many leading blocks are there."""
        return next((at for at, each in enumerate(hashes) if each not in self._order), len(hashes))

    def keep(self, hashes: list[bytes]) -> None:
        """All blocks of a request, which it holds until it ends."""
        for block_hash in reversed(hashes):
            self._order[block_hash] = None
            self._order.move_to_end(block_hash)
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)


def asked(demand: Demand) -> list[bytes]:
    """Blocks of a prompt that need not be computed if they are there: the last token always is."""
    return demand.hashes[: (demand.prompt_tokens - 1) // BLOCK_SIZE]


def replay(trace: Trace, cache: Cache, front_blocks: int = 0) -> dict[str, float]:
    """The trace through one cache."""
    timing, front = Timing(), Front(front_blocks)
    hits = front_hits = tokens = offered = 0
    whole = left = 0.0
    for demand in trace.demands:
        hashes = asked(demand)
        own = front.leading(hashes) if front_blocks else 0
        found = cache.leading(hashes, own)
        front.keep(demand.hashes)
        # A block that came from the tier is there; one from the worker's own cache was offered when it was computed.
        cache.offer(demand.hashes, found)
        offered += len(demand.hashes) - found
        front_hits += own * BLOCK_SIZE
        hits += found * BLOCK_SIZE
        tokens += demand.prompt_tokens
        whole += timing.prompt(0, demand.prompt_tokens, _CHUNK)
        left += timing.prompt(found * BLOCK_SIZE, demand.prompt_tokens, _CHUNK)
    return {
        "hit_rate": hits / tokens,
        "front_hit_rate": front_hits / tokens,
        "saved": 1 - left / whole,
        "writes": cache.writes / max(1, offered),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", default="tool_agent", help=f"like a,b: {', '.join(GENERATED)} (generated), or names in --folder"
    )
    parser.add_argument("--folder", help=f"where traces lie as NAME.jsonl; otherwise {TRACES_VARIABLE} says it")
    parser.add_argument("--requests", type=int, default=0, help="the first so many of each trace; 0: all")
    parser.add_argument("--working-sets", default="0.5,1,2,4", help="distinct blocks of the trace, times the tier's")
    parser.add_argument("--policies", default="all", help=f"of {', '.join([*POLICIES, OPTIMUM])}; all: the default")
    parser.add_argument("--front", type=float, default=0.0, help="a worker's cache, as a share of the tier; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the report, after each replay")
    return parser


def main() -> None:
    """The command: a table in Markdown, and the JSON."""
    parser = _parser()
    arguments = parser.parse_args()
    names = [*POLICIES, OPTIMUM] if arguments.policies == "all" else arguments.policies.split(",")
    if unknown := set(names) - {*POLICIES, OPTIMUM}:
        parser.error(f"no policy {min(unknown)!r}; there are {', '.join([*POLICIES, OPTIMUM])}")
    results: list[dict[str, Any]] = []
    try:
        for name in arguments.traces.split(","):
            trace = load_trace(name, arguments.folder, limit=arguments.requests, seed=arguments.seed)
            distinct = len({each for demand in trace.demands for each in demand.hashes})
            print(f"\n{trace.name}: {len(trace.demands)} requests, {distinct} distinct blocks of {BLOCK_SIZE} tokens; ")
            print(f"an endless tier would hit {100 * trace.endless_hit_rate:.1f} % of the prompts' tokens\n")
            print(_HEAD)
            for working_set in map(float, arguments.working_sets.split(",")):
                capacity = max(1, int(distinct / working_set))
                front = int(arguments.front * capacity)
                for policy in names:
                    if policy == OPTIMUM and front:
                        continue
                    cache: Cache = (
                        Optimum(trace.demands, capacity)
                        if policy == OPTIMUM
                        else Tier(POLICIES[policy](capacity), capacity)
                    )
                    found = replay(trace, cache, front)
                    results.append({"trace": trace.name, "working_set": working_set, "policy": policy, **found})
                    row = " | ".join(f"{100 * value:.1f}" for value in found.values())
                    print(f"| {working_set:g} | {policy} | {row} |", flush=True)
                    if arguments.json is not None:
                        arguments.json.write_text(report("bench.tier_policies", {"replays": results}))
    except BenchError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
