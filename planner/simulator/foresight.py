"""Belady's optimum as a policy: of what is there and what comes goes the block whose next use is farthest away.

It knows the whole trace. A block is asked for only with all before it, so of one prompt the last block goes first, and
the optimum for single blocks is that for prompts.
"""

from collections.abc import Sequence

from kv_transfer.tiers.policies.base import Arrival, Held
from kv_transfer.tiers.policies.ranking import Ranking
from planner.simulator.demand import Demand

OPTIMUM = "optimum"
_LONGEST = 1 << 20  # blocks of a prompt, more than there are


class Future:
    """When each block is asked for next, in numbers of requests, as they come in the order of the trace."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        self._uses: dict[bytes, list[int]] = {}
        self._place: dict[bytes, int] = {}
        self._watchers: list[Optimum] = []
        for number in reversed(range(len(demands))):
            for at, block_hash in enumerate(demands[number].cacheable):
                self._uses.setdefault(block_hash, []).append(number)
                self._place[block_hash] = at

    def watch(self, optimum: "Optimum") -> None:
        """It is told which uses are over."""
        self._watchers.append(optimum)

    def came(self, demand: Demand) -> None:
        """One use of each of its blocks is over."""
        hashes = demand.cacheable
        for block_hash in hashes:
            self._uses[block_hash].pop()
        for optimum in self._watchers:
            optimum.passed(hashes)

    def value(self, block_hash: bytes) -> float | None:
        """The less the later it is used; None: never again."""
        uses = self._uses.get(block_hash)
        return -(uses[-1] + self._place[block_hash] / _LONGEST) if uses else None


class Optimum:
    """Nobody can keep more of what will be asked for."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._there = Ranking()
        self._done: dict[bytes, None] = {}  # there, and asked for no more
        future.watch(self)

    def __len__(self) -> int:
        return len(self._there) + len(self._done)

    def admits(self, arrival: Arrival) -> bool:
        """What is asked for again."""
        return self._future.value(arrival.key) is not None

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """What is asked for no more, else what is asked for last, unless that is what comes."""
        own = self._future.value(arrival.key)
        for key in self._done:
            if not held(key):
                del self._done[key]
                return key
        worst = self._there.pop(held)
        if worst is None:
            return None
        now = self._future.value(worst[0])
        if now is not None and (own is None or now >= own):
            self._there.set(worst[0], now)
            return None
        return worst[0]

    def insert(self, arrival: Arrival) -> None:
        """As one that was used."""
        self.touch(arrival.key)

    def passed(self, hashes: Sequence[bytes]) -> None:
        """These were asked for, of whomever."""
        for key in hashes:
            if key in self._there or key in self._done:
                self.touch(key)

    def touch(self, key: bytes) -> None:
        """By its next use, if there is one."""
        value = self._future.value(key)
        if value is None:
            if key in self._there:
                self._there.remove(key)
            self._done[key] = None
        else:
            self._done.pop(key, None)
            self._there.set(key, value)

    def remove(self, key: bytes) -> None:
        """From wherever it is."""
        if key in self._done:
            del self._done[key]
        else:
            self._there.remove(key)
