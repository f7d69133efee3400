"""Blocks that a tier keeps, without their bytes: the policies' own code, as `kv_transfer.tiers.disk` asks it."""

from collections.abc import Callable, Sequence

from kv_transfer.tiers.policies.base import Arrival, Held, Policy

Origin = Callable[[bytes], tuple[int, bytes]]  # of a block: its place in its prompt, and the block before it


def nobody(key: bytes) -> bool:
    """No block is held."""
    return False


class Kept:
    """At most `capacity` blocks, 0 or more. Places in prompts are those of an engine's blocks of 16 tokens."""

    def __init__(self, policy: Policy, capacity: int, origin: Origin) -> None:
        self._policy = policy
        self._capacity = capacity
        self._origin = origin
        self._there: set[bytes] = set()
        self.writes = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._there

    def __len__(self) -> int:
        return len(self._there)

    def hashes(self) -> list[bytes]:
        """All of them."""
        return list(self._there)

    def leading(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """How many leading blocks are there if the first `start` are."""
        count = start
        while count < len(hashes) and hashes[count] in self._there:
            count += 1
        return count

    def use(self, hashes: Sequence[bytes]) -> None:
        """Those of a prompt that are there are used now. Tails first, so that heads are the latest."""
        for block_hash in reversed(hashes):
            if block_hash in self._there:
                self._policy.touch(block_hash)

    def offer(self, hashes: Sequence[bytes], held: Held = nobody) -> tuple[list[bytes], list[bytes]]:
        """Blocks of one prompt come in order: which were stored, and which had to go for them.

        Heads get room first, and none of them goes for what comes behind it.
        """
        heads: set[bytes] = set()
        stored: list[Arrival] = []
        gone: list[bytes] = []
        for block_hash in hashes:
            heads.add(block_hash)
            if block_hash in self._there:
                continue
            arrival = Arrival(block_hash, *self._origin(block_hash))
            if not self._policy.admits(arrival):
                continue
            if len(self._there) >= self._capacity:
                victim = self._policy.evict(arrival, lambda key: key in heads or held(key))
                if victim is None:
                    continue
                self._there.remove(victim)
                gone.append(victim)
            self._there.add(block_hash)
            stored.append(arrival)
        for arrival in reversed(stored):
            self._policy.insert(arrival)
        self.writes += len(stored)
        return [arrival.key for arrival in stored], gone
