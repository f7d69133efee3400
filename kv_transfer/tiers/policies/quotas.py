"""Another policy for each owner's blocks, none of whom may fill more than a share while others want room.

Whose a block is has to be told with it: hashes do not say it, as a salt cannot be got out of one. A tenant's blocks can
be told by the root of their hashes, which whoever has the request knows. Blocks of nobody know no bound.
"""

from collections.abc import Callable, Iterator

from kv_transfer.tiers.policies.base import Arrival, Held, Policy


class Quotas:
    """An owner beyond its share gives room to itself; otherwise who has the most gives it.

    `policy` lets all in: an owner has one only while it has blocks, as owners are as many as clients like.
    """

    def __init__(self, policy: Callable[[int], Policy], capacity: int, share: float) -> None:
        self._make = policy
        self._capacity = capacity
        self._most = max(1, int(share * capacity))
        self._policies: dict[bytes, Policy] = {}
        self._owners: dict[bytes, bytes] = {}
        self._owners_with: dict[int, dict[bytes, None]] = {}  # by how many blocks they have

    def __len__(self) -> int:
        return len(self._owners)

    def admits(self, arrival: Arrival) -> bool:
        """As its owner's policy says."""
        own = self._policies.get(arrival.owner)
        return own is None or own.admits(arrival)

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """Of the owners with most blocks the first that has one to give; of equal ones who brings this one."""
        for policy in self._givers(arrival.owner):
            if (victim := policy.evict(arrival, held)) is not None:
                self._forget(victim)
                return victim
        return None

    def insert(self, arrival: Arrival) -> None:
        """Counts for its owner."""
        owner = self._owners[arrival.key] = arrival.owner
        if owner not in self._policies:
            self._policies[owner] = self._make(self._capacity)
        self._policies[owner].insert(arrival)
        self._recount(owner, len(self._policies[owner]) - 1)

    def touch(self, key: bytes) -> None:
        """Whoever used it, it stays its owner's."""
        self._policies[self._owners[key]].touch(key)

    def remove(self, key: bytes) -> None:
        """Counts no more."""
        self._policies[self._owners[key]].remove(key)
        self._forget(key)

    def _givers(self, owner: bytes) -> Iterator[Policy]:
        own = self._policies.get(owner)
        if owner and own is not None and len(own) >= self._most:
            yield own
            return
        for count in sorted(self._owners_with, reverse=True):  # few: owners with different counts have many blocks
            if own is not None and len(own) == count:
                yield own
            yield from (self._policies[each] for each in self._owners_with[count] if each != owner)

    def _forget(self, key: bytes) -> None:
        owner = self._owners.pop(key)
        self._recount(owner, len(self._policies[owner]) + 1)
        if not len(self._policies[owner]):
            del self._policies[owner]

    def _recount(self, owner: bytes, before: int) -> None:
        if before:
            del self._owners_with[before][owner]
            if not self._owners_with[before]:
                del self._owners_with[before]
        if count := len(self._policies[owner]):
            self._owners_with.setdefault(count, {})[owner] = None
