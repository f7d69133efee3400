"""The least recently used block goes."""

from collections import OrderedDict

from kv_transfer.tiers.policies.base import Arrival, Held


class LRU:
    """One list, by last use."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # the next to go first

    def __len__(self) -> int:
        return len(self._order)

    def admits(self, arrival: Arrival) -> bool:
        """All are let in."""
        return True

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """What is held counts as used now, so that it is not looked at again each time."""
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            if not held(key):
                del self._order[key]
                return key
            self._order.move_to_end(key)
        return None

    def insert(self, arrival: Arrival) -> None:
        """As the latest."""
        self._order[arrival.key] = None

    def touch(self, key: bytes) -> None:
        """As the latest."""
        self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """From wherever it is."""
        del self._order[key]
