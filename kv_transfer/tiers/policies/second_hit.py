"""Lets a block in the second time that it is offered: most are never asked for again, and writes wear a disk out."""

from collections import OrderedDict

from kv_transfer.tiers.policies.base import Arrival, Held, Policy


class SecondHit:
    """Another policy behind this door. Remembers twice as many hashes that were offered as there is room for blocks."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._most = 2 * capacity

    def __len__(self) -> int:
        return len(self._policy)

    def admits(self, arrival: Arrival) -> bool:
        """Whether it was offered before."""
        if arrival.key in self._offered:
            return self._policy.admits(arrival)
        self._offered[arrival.key] = None
        if len(self._offered) > self._most:
            self._offered.popitem(last=False)
        return False

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """As the other policy says."""
        return self._policy.evict(arrival, held)

    def insert(self, arrival: Arrival) -> None:
        """As the other policy says. What went is let in again at once."""
        self._policy.insert(arrival)

    def touch(self, key: bytes) -> None:
        """As the other policy says."""
        self._policy.touch(key)

    def remove(self, key: bytes) -> None:
        """As the other policy says."""
        self._policy.remove(key)
