"""Paged KV blocks: who holds them, what is in them, and which one to take next.

Pure bookkeeping over block ids; the bytes live in `engine.kv_cache`. A block is *free* (nobody holds it; it may still
be found by its hash: *cached*) or *active* (one or more holders). A freed block keeps its content until it is handed
out again, least recently freed first, so the free list is the LRU list of the prefix cache. Each time a block is handed
out its generation grows, so a reference to the earlier content can be told from one to the new.

One pool serves one cache group: all layers whose KV is kept for all tokens alike. A model with sliding-window, latent
or recurrent layers has one pool per group, each with its own block tables; a prefix hit is then the shortest over
groups.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent


class OutOfBlocks(Exception):
    """Fewer blocks are free than asked for; nothing was allocated."""


class BlockPool:
    """`num_blocks` blocks with reference counts, generations, a hash index and LRU reuse."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._spare: OrderedDict[int, None] = OrderedDict()  # free likewise, but another worker has what they hold
        self._in_transfer: set[int] = set()
        self._events: list[KvEvent] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + len(self._spare)

    def generation(self, block_id: int) -> int:
        """How often the block was handed out."""
        return self._generations[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each; forgets what they held. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._next() for _ in range(count)]
        removed = []
        for block in blocks:
            self._references[block] = 1
            self._generations[block] += 1
            if (block_hash := self._hash_of[block]) is not None:
                self._hash_of[block] = None
                del self._block_of[block_hash]
                removed.append(block_hash)
        if removed:
            self._events.append(BlockRemoved(removed))
        return blocks

    def _next(self) -> int:
        """The block that is handed out next: one that holds nothing, a spare one, the least recently freed."""
        if self._spare and (not self._free or self._hash_of[next(iter(self._free))] is not None):
            return self._spare.popitem(last=False)[0]
        return self._free.popitem(last=False)[0]

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a block with that hash can be found."""
        return block_hash in self._block_of

    def match(self, hashes: Iterable[bytes]) -> int:
        """How many leading blocks of the chain are cached."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._block_of:
                break
            count += 1
        return count

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest cached prefix of the chain, one reference taken on each block."""
        blocks = [self._block_of[block_hash] for block_hash in hashes[: self.match(hashes)]]
        for block in blocks:
            if self._references[block] == 0:
                del (self._spare if block in self._spare else self._free)[block]
            self._references[block] += 1
        return blocks

    def release(self, block_ids: Sequence[int], *, copied: bool = False) -> None:
        """Drops one reference of each. The last blocks are freed first, so that prefixes live longer than tails.

        `copied`: another worker has taken what they hold, and will use it there. Those that nobody else holds here are
        handed out before any other that holds something: two copies that stay would drive out the only ones of others.
        """
        for block in reversed(block_ids):
            if self._references[block] < 1:
                raise AssertionError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._in_transfer.discard(block)
                (self._spare if copied else self._free)[block] = None
                if not copied and self._hash_of[block] is None:
                    # Nothing worth keeping: the next to be handed out.
                    self._free.move_to_end(block, last=False)

    def publish(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        *,
        position: int = 0,
        parent: bytes = b"",
        root: bytes = b"",
    ) -> None:
        """Lets full, computed blocks be found. Where the hash is known already, the first block keeps it.

        They are told with where they come in their prompt: see `BlockStored`.
        """
        run: list[bytes] = []  # stored one behind the other
        for at, (block, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            if self._hash_of[block] is None and block_hash not in self._block_of:
                self._hash_of[block] = block_hash
                self._block_of[block_hash] = block
                if not run:
                    before = hashes[at - 1] if at else parent
                    self._events.append(BlockStored(run, position + at, before, root))
                run.append(block_hash)
            else:
                run = []

    def mark_transfer(self, block_ids: Iterable[int]) -> None:
        """Counts these blocks under "transfer" until they are free: a peer may still write them."""
        self._in_transfer.update(block_ids)

    def unmark_transfer(self, block_ids: Iterable[int]) -> None:
        """The peer has written its last byte into these blocks."""
        self._in_transfer.difference_update(block_ids)

    def num_idle(self, hashes: Iterable[bytes]) -> int:
        """How many of these cached blocks nobody holds, so that acquiring them shrinks the free list."""
        return sum(self._references[self._block_of[block_hash]] == 0 for block_hash in hashes)

    def clear(self) -> None:
        """Forgets all cached content; blocks in use stay with their holders."""
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._free.update(self._spare)
        self._spare.clear()
        self._events.append(CacheCleared())

    def hashes(self) -> list[bytes]:
        """All hashes that can be found now."""
        return list(self._block_of)

    def drain_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def counts(self) -> dict[str, int]:
        """Blocks by state: free, cached (free but findable), active, transfer (a peer may write)."""
        cached = sum(1 for block in (*self._free, *self._spare) if self._hash_of[block] is not None)
        held = self.num_blocks - self.num_free
        transfer = len(self._in_transfer)
        return {"free": self.num_free - cached, "cached": cached, "active": held - transfer, "transfer": transfer}

    def check(self) -> None:
        """Raises AssertionError if the books do not balance."""
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} references"
            free = (block in self._free) + (block in self._spare)
            assert free == (references == 0), f"block {block} is free and held at once, or neither, or free twice"
        assert all(self._hash_of[block] == block_hash for block_hash, block in self._block_of.items())
        assert sum(block_hash is not None for block_hash in self._hash_of) == len(self._block_of)
        assert all(self._references[block] > 0 for block in self._in_transfer)
