"""Two lists, of blocks that were used once and of those used again, whose shares follow what is missed.

ARC (N. Megiddo and D. Modha, FAST 2003). Each list remembers what went from it, as ghosts; a block that comes back and
is a ghost of one of them says that this list was too short.
"""

from collections import OrderedDict

from kv_transfer.tiers.policies.base import Arrival, Held

_Keys = OrderedDict[bytes, None]  # the next to go first


class ARC:
    """`capacity` blocks, and at most as many ghosts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: _Keys = OrderedDict()
        self._again: _Keys = OrderedDict()
        self._ghosts_once: _Keys = OrderedDict()
        self._ghosts_again: _Keys = OrderedDict()
        self._share = 0.0  # of the list of blocks used once, in blocks

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def admits(self, arrival: Arrival) -> bool:
        """All are let in; ghosts move the shares."""
        once, again = len(self._ghosts_once), len(self._ghosts_again)
        if arrival.key in self._ghosts_once:
            self._share = min(self._capacity, self._share + max(1.0, again / once))
        elif arrival.key in self._ghosts_again:
            self._share = max(0.0, self._share - max(1.0, once / again))
        return True

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """From the list that is beyond its share; from the other one where all of it is held."""
        beyond = len(self._once) > self._share or (
            arrival.key in self._ghosts_again and len(self._once) >= max(1.0, self._share)
        )
        first, second = (self._once, self._ghosts_once), (self._again, self._ghosts_again)
        for keys, ghosts in (first, second) if beyond else (second, first):
            for _ in range(len(keys)):
                key, _ = keys.popitem(last=False)
                if not held(key):
                    ghosts[key] = None
                    self._trim()
                    return key
                keys[key] = None
        return None

    def insert(self, arrival: Arrival) -> None:
        """A ghost was used before."""
        was_here = arrival.key in self._ghosts_once or arrival.key in self._ghosts_again
        self._ghosts_once.pop(arrival.key, None)
        self._ghosts_again.pop(arrival.key, None)
        (self._again if was_here else self._once)[arrival.key] = None

    def touch(self, key: bytes) -> None:
        """Used again."""
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """No ghost of it stays."""
        (self._once if key in self._once else self._again).pop(key)

    def _trim(self) -> None:
        if self._ghosts_once and len(self._once) + len(self._ghosts_once) > self._capacity:
            self._ghosts_once.popitem(last=False)
        if len(self._ghosts_once) + len(self._ghosts_again) > self._capacity:
            (self._ghosts_again or self._ghosts_once).popitem(last=False)
