"""The blocks of the KV service's host memory, of which a policy says what goes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from engine.block_pool import BlockPool
from engine.request import BlockRemoved
from kv_transfer.tiers.policies.base import Arrival, Policy


class KeptPool(BlockPool):
    """`make_policy` makes it for so many blocks; `arrival` tells what is known of one. All are let in.

    The free list begins with blocks that hold nothing, as in any pool. What is held to be written or sent says nothing
    of its worth: uses are told by `used`.
    """

    def __init__(
        self, num_blocks: int, make_policy: Callable[[int], Policy], arrival: Callable[[bytes], Arrival]
    ) -> None:
        super().__init__(num_blocks)
        self._make_policy = make_policy
        self._policy = make_policy(num_blocks)
        self._arrival = arrival
        self.coming: Sequence[bytes] = ()  # for which blocks are allocated next
        self._pinned: set[bytes] = set()
        self._held: dict[bytes, int] = {}  # blocks of those that are here, each with a reference of ours

    def allocate(self, count: int) -> list[int]:
        """See `BlockPool.allocate`."""
        if count <= self.num_free:
            empty = sum(self._hash_of[block] is None for block in islice(self._free, count))
            coming = (self._arrival(each) for each in self.coming if each not in self._block_of)
            for number in range(count):
                arrival = next(coming, Arrival(b""))
                self._policy.admits(arrival)
                if number >= empty:
                    self._evict(arrival)
        return super().allocate(count)

    def release(self, block_ids: Sequence[int], *, copied: bool = False) -> None:
        """See `BlockPool.release`. Workers' copies are no reason to keep less: the policy says what goes."""
        super().release(block_ids)

    def publish(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        *,
        position: int = 0,
        parent: bytes = b"",
        root: bytes = b"",
    ) -> None:
        """See `BlockPool.publish`."""
        new = [each for each in hashes if each not in self._block_of]
        super().publish(block_ids, hashes, position=position, parent=parent, root=root)
        for block_hash in reversed(new):
            if block_hash in self._block_of:
                self._policy.insert(self._arrival(block_hash))
                if block_hash in self._pinned:
                    self._hold(block_hash)

    @property
    def pinned_here(self) -> Mapping[bytes, int]:
        """Blocks by hash that are held since they are pinned."""
        return self._held

    def pin(self, hashes: Sequence[bytes]) -> None:
        """These are not given up until `unpin`. What is not here is held once it comes."""
        for block_hash in hashes:
            self._pinned.add(block_hash)
            if block_hash in self._block_of and block_hash not in self._held:
                self._hold(block_hash)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Ends that."""
        self._pinned.difference_update(hashes)
        self.release([self._held.pop(each) for each in hashes if each in self._held])

    def used(self, hashes: Sequence[bytes]) -> None:
        """A worker has asked for these leading blocks of a prompt, which are here."""
        for block_hash in reversed(hashes):
            self._policy.touch(block_hash)

    def counts(self) -> dict[str, int]:
        """See `BlockPool.counts`. What is held only since it is pinned counts as cached."""
        counts = super().counts()
        idle = sum(self._references[block] == 1 for block in self._held.values())
        return counts | {"cached": counts["cached"] + idle, "active": counts["active"] - idle}

    def clear(self) -> None:
        """See `BlockPool.clear`. What is pinned is held again when it comes again."""
        self.release(list(self._held.values()))
        self._held.clear()
        super().clear()
        self._policy = self._make_policy(self.num_blocks)

    def _hold(self, block_hash: bytes) -> None:
        (self._held[block_hash],) = self.acquire([block_hash])

    def _evict(self, arrival: Arrival) -> None:
        """Has a block hold nothing: it is the next to be handed out."""
        victim = self._policy.evict(arrival, lambda each: self._references[self._block_of[each]] > 0)
        if victim is None:  # the policy would rather keep what is there, but what comes is on its way
            block = next(block for block in self._free if self._hash_of[block] is not None)
            victim = self._hash_of[block]
            assert victim is not None
            self._policy.remove(victim)
        block = self._block_of.pop(victim)
        self._hash_of[block] = None
        self._events.append(BlockRemoved([victim]))
        self._free.move_to_end(block, last=False)
