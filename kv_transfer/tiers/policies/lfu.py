"""The block that was used least often goes; a use counts for less the longer it is ago.

Its value is the sum over its uses of 2 ** -(age / half-life), ages in uses of all blocks (LRFU; D. Lee et al., IEEE
Transactions on Computers 50, 2001). All values fade alike, so their order only changes with a use: kept are logarithms
of what the values were at the beginning of time.
"""

import math
from collections import OrderedDict

from kv_transfer.tiers.policies.base import Arrival, Held
from kv_transfer.tiers.policies.ranking import Ranking

_HALF_LIFE = 2.0  # times the capacity


class LFU:
    """Remembers as many blocks that went as there is room for, so that one that comes back has its uses."""

    def __init__(self, capacity: int) -> None:
        self._ranking = Ranking()
        self._gone: OrderedDict[bytes, float] = OrderedDict()
        self._capacity = capacity
        self._half_life = _HALF_LIFE * capacity
        self._uses = 0

    def __len__(self) -> int:
        return len(self._ranking)

    def admits(self, arrival: Arrival) -> bool:
        """All are let in."""
        return True

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """The least value; of equal ones the one that was used first."""
        victim = self._ranking.pop(held)
        if victim is None:
            return None
        self._gone[victim[0]] = victim[1]
        while len(self._gone) > self._capacity:
            self._gone.popitem(last=False)
        return victim[0]

    def insert(self, arrival: Arrival) -> None:
        """One more use."""
        self._use(arrival.key, self._gone.pop(arrival.key, -math.inf))

    def touch(self, key: bytes) -> None:
        """One more use."""
        self._use(key, self._ranking.value(key))

    def remove(self, key: bytes) -> None:
        """With all that is known of it."""
        self._ranking.remove(key)

    def _use(self, key: bytes, before: float) -> None:
        self._uses += 1
        now = self._uses / self._half_life
        self._ranking.set(key, now + math.log2(1 + 2.0 ** (before - now)))
