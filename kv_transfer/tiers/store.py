"""What a tier is: blocks of KV by their hash, all of one format, got and put in batches.

A store may lose blocks at any time and never returns wrong ones: what is read is compared with the hash and the format
that it was stored under and with a checksum of its bytes. What fails is a miss, counted and removed. Nothing raises on
the way of a request: a full disk, a failing device or a server that is down make misses and blocks that are not kept.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import xxhash

from engine.hashing import HASH_BYTES
from engine.request import KvEvent
from kv_transfer.tiers.breaker import Breaker

T = TypeVar("T")


class StoreError(Exception):
    """A store cannot be opened, or was asked for what it can never do; the message says what to do."""


@dataclass(frozen=True)
class BlockFormat:
    """What the blocks of a store are. Of equal formats, equal hashes are equal bytes."""

    fingerprint: str  # of the model
    layout: str  # `KVCacheSpec.layout`
    block_bytes: int

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name it."""
        digest = hashlib.sha256()
        for text in (self.fingerprint, self.layout, str(self.block_bytes)):
            digest.update(len(text.encode()).to_bytes(4, "little") + text.encode())
        return digest.digest()[:HASH_BYTES]


@dataclass
class StoreCounts:
    """What a store did since it was opened, in blocks where nothing else is said."""

    hits: int = 0  # found and verified
    misses: int = 0  # all others that were asked for
    stored: int = 0
    unworthy: int = 0  # not stored: the policy would rather keep what is there
    skipped: int = 0  # not stored: no room, busy, or the store is out of order
    evicted: int = 0  # to make room
    corrupt: int = 0  # wrong, short or damaged: removed
    faults: int = 0  # operations that failed
    read_bytes: int = 0
    read_seconds: float = 0.0  # in which at least one `get` was reading
    written_bytes: int = 0
    packed_bytes: int = 0  # the same as values of Redis or an object store, packed or not, with their seals
    write_seconds: float = 0.0  # in which at least one `put` was writing


@dataclass(frozen=True)
class Origin:
    """Where a batch of blocks comes from, for the policy. They follow each other in one prompt."""

    position: int = 0  # of the first, in blocks from the beginning of the prompt
    parent: bytes = b""  # hash of the block before the first; empty: none, or not known
    owner: bytes = b""  # whose quota they count for, 16 bytes; empty: nobody's


ANYWHERE = Origin()


class Store(Protocol):
    """One tier. All methods are called on one event loop.

    A batch's hashes are those of consecutive blocks of one prompt, in order; `into` and `blocks` are as many contiguous
    ranges of `format.block_bytes` bytes. Memory given to `get` or `put` is left alone once the call has ended, also if
    it was cancelled.
    """

    name: str  # of the kind of tier: disk, redis, object
    format: BlockFormat
    counts: StoreCounts
    breaker: Breaker  # leaves it alone while it is out of order

    @property
    def used_bytes(self) -> int:
        """Of the blocks that this process knows to be there."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The bound; 0 where another party sets it."""
        ...

    async def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are believed to be there."""
        ...

    async def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Which blocks were found and verified; these are in `into`. Of the others it holds anything."""
        ...

    async def put(self, hashes: Sequence[bytes], blocks: Sequence[memoryview], origin: Origin = ANYWHERE) -> list[bool]:
        """Which blocks are there now. A block that was there is not written again."""
        ...

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """These are not found any more, nor after a restart, nor by a `put` that was under way."""
        ...

    async def clear(self) -> None:
        """The same for all blocks of this format."""
        ...

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Not to be evicted until as many `unpin`. What is not there is pinned as well, for when it comes.

        Where another party decides what goes, as in Redis, this does nothing.
        """
        ...

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Ends one `pin` of each."""
        ...

    def hashes(self) -> list[bytes]:
        """All that this process knows to be there; after opening what was found."""
        ...

    def drain_events(self) -> list[KvEvent]:
        """What changed since the last call, in order. What was there when the store was opened is no event."""
        ...

    async def close(self) -> None:
        """Ends what is under way and gives everything back."""
        ...


def check_batch(format: BlockFormat, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    """Raises StoreError unless there is a block's memory for each hash."""
    if len(hashes) != len(memory):
        raise StoreError(f"{len(hashes)} hashes, but memory for {len(memory)} blocks")
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise StoreError(f"a block's hash has {HASH_BYTES} bytes")
    if any(block.nbytes != format.block_bytes or not block.c_contiguous for block in memory):
        raise StoreError(f"a block of this store is one contiguous range of {format.block_bytes} bytes")


class Stopwatch:
    """Seconds in which at least one of several operations was running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = 0
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around an operation."""
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self.seconds += now - self._since
            self._since = now
            self._running -= 1


async def to_its_end(work: Awaitable[T]) -> T:
    """What `work` returns. Who is cancelled meanwhile hears of it when it has ended: threads cannot be called back,
    and memory that one still fills must not be given to anybody else.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


def checksum(block: memoryview) -> int:
    """64 bits over a block's bytes: xxh3, as for pages in transfers (`kv_transfer.checksums`)."""
    return xxhash.xxh3_64_intdigest(block)
