"""Keys by a number each; the least is found without looking at the others."""

import heapq
from collections import OrderedDict

from kv_transfer.tiers.policies.base import Held

_SLACK = 64  # entries of the heap that may be out of date, beside as many as there are keys
_LOOKED_AT = 8  # held keys each time, whether they are held still

_Entry = tuple[float, int, bytes]


class Ranking:
    """A heap that forgets late: changed and removed keys stay in it until they come up.

    Keys that are held when they come up lie aside, out of the way of the next one. Each time some are looked at, so
    that one that is held no more comes back, at the latest when nothing else is left.
    """

    def __init__(self) -> None:
        self._entry: dict[bytes, _Entry] = {}
        self._heap: list[_Entry] = []
        self._aside: OrderedDict[bytes, _Entry] = OrderedDict()  # the next to be looked at first
        self._changes = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entry

    def set(self, key: bytes, value: float) -> None:
        """Ranks a key, new or not; of equal values the one set first is less."""
        self._changes += 1
        self._aside.pop(key, None)
        self._entry[key] = entry = (value, self._changes, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + _SLACK:
            self._heap = [each for each in self._entry.values() if each[2] not in self._aside]
            heapq.heapify(self._heap)

    def value(self, key: bytes) -> float:
        """What it was set to."""
        return self._entry[key][0]

    def remove(self, key: bytes) -> None:
        """Takes out a key that is there."""
        del self._entry[key]
        self._aside.pop(key, None)

    def pop(self, held: Held) -> tuple[bytes, float] | None:
        """Takes out the least key that is not held, with its value; None if there is none."""
        self._look_again(_LOOKED_AT, held)
        while self._heap or self._look_again(len(self._aside), held):
            entry = heapq.heappop(self._heap)
            value, _, key = entry
            if self._entry.get(key) is not entry:
                continue
            if not held(key):
                del self._entry[key]
                return key, value
            self._aside[key] = entry
        return None

    def _look_again(self, count: int, held: Held) -> bool:
        """At so many of those aside; whether one is held no more."""
        before = len(self._aside)
        for _ in range(min(count, before)):
            key, entry = self._aside.popitem(last=False)
            if held(key):
                self._aside[key] = entry
            else:
                heapq.heappush(self._heap, entry)
        return len(self._aside) < before
