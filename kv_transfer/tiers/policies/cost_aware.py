"""The block goes whose loss costs least: time to compute it again, times how likely it is asked for, per byte.

Blocks of a store are of one size, so bytes do not count. A block is of use only with all before it, so none goes while
one behind it is there: candidates are the last blocks of prompts. To compute a block takes the longer the more tokens
it attends to. How likely a block is asked for is told by its uses, and by how long ago the last one was: each eviction
raises what a use is worth from then on to the value of what went (GreedyDual-Size-Frequency, L. Cherkasova, 1998).
"""

from collections import Counter

from kv_transfer.tiers.policies.base import Arrival, Held
from kv_transfer.tiers.policies.ranking import Ranking

# Blocks, of 16 tokens, before one that takes twice as long to compute as the first: for 8 billion parameters on an
# H200, bench/results/2026-11-28-h100-h200.md.
_DOUBLING = 800
_MOST_USES = 16  # that count, so that what was popular once does not stay for ever


class CostAware:
    """A tree of blocks by their parents, and a ranking of its leaves."""

    def __init__(self, capacity: int) -> None:
        self._arrivals: dict[bytes, Arrival] = {}
        self._uses: dict[bytes, int] = {}
        self._values: dict[bytes, float] = {}
        self._children: Counter[bytes] = Counter()
        self._leaves = Ranking()
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._arrivals)

    def admits(self, arrival: Arrival) -> bool:
        """All are let in."""
        return True

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """The leaf of least value. Not the block before the one that comes: it is a leaf until that is there."""
        victim = self._leaves.pop(lambda key: key == arrival.parent or held(key))
        if victim is None:
            return None
        self._floor = victim[1]
        self._forget(victim[0])
        return victim[0]

    def insert(self, arrival: Arrival) -> None:
        """A block whose children may be there already."""
        self._arrivals[arrival.key] = arrival
        self._uses[arrival.key] = 0
        self._children[arrival.parent] += 1
        if arrival.parent in self._leaves:
            self._leaves.remove(arrival.parent)
        self.touch(arrival.key)

    def touch(self, key: bytes) -> None:
        """One more use."""
        self._uses[key] = min(self._uses[key] + 1, _MOST_USES)
        cost = 1 + self._arrivals[key].position / _DOUBLING
        self._values[key] = self._floor + self._uses[key] * cost
        if not self._children[key]:
            self._leaves.set(key, self._values[key])

    def remove(self, key: bytes) -> None:
        """Also from the midst of a prompt."""
        if key in self._leaves:
            self._leaves.remove(key)
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        parent = self._arrivals.pop(key).parent
        del self._uses[key], self._values[key]
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._arrivals:
                self._leaves.set(parent, self._values[parent])
