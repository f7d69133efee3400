"""A tier that others keep for us, shared by all who serve the model: a value for each block, under a seal.

What Redis and object stores have in common. A store that is down or slow is left alone after some faults, and while
many operations wait no more are begun. Whatever an operation raises is a fault of the store: what answers may be
another server, or break the protocol. What this process has seen there is what `hashes` tells; others may have removed
it since.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import structlog

from engine.hashing import HASH_BYTES
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from kv_transfer.tiers.breaker import Breaker
from kv_transfer.tiers.seal import SEAL_BYTES, Seal
from kv_transfer.tiers.store import (
    ANYWHERE,
    BlockFormat,
    Origin,
    Stopwatch,
    StoreCounts,
    StoreError,
    check_batch,
    to_its_end,
)

log = structlog.get_logger()

_BATCH = 8 << 20  # bytes that one round trip carries, or one block if that is more
_WAITING = 16  # operations under way; more are not begun
_KNOWN = 1 << 20  # hashes that are remembered
_LIST_SECONDS = 2.0  # for finding what is there at start
_FULL_SECONDS = 10.0  # after which a store without room is tried again
_REMOVED_AT_ONCE = 1000


class RemoteStore(ABC):
    """A `Store` over six operations on values.

    `key`: the cluster's, which proves who wrote a value; empty: none. `codec`: of `kv_transfer.connectors.codec`, packs
    what is written; 0: none.
    """

    name: str
    capacity_bytes = 0  # others' business

    def __init__(self, format: BlockFormat, key: bytes, codec: int) -> None:
        self.format = format
        self.counts = StoreCounts()
        self._seal = Seal(format, key, codec)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._writing: set[bytes] = set()
        self._unwanted: set[bytes] = set()  # deleted while they were written
        self._events: list[KvEvent] = []
        self.breaker = Breaker()
        self._waiting = 0
        self._full_until = 0.0
        self._read_time, self._write_time = Stopwatch(), Stopwatch()

    @abstractmethod
    async def _exist(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which have a value."""

    @abstractmethod
    async def _fetch(self, hashes: Sequence[bytes]) -> list[Any]:
        """Of each its value, as a buffer, which is empty for what can be none; None where there is nothing."""

    @abstractmethod
    async def _store(self, values: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Which were stored; there was no room for the others."""

    @abstractmethod
    async def _remove(self, hashes: Sequence[bytes]) -> None:
        """Whether they have values or not."""

    @abstractmethod
    def _list(self) -> AsyncIterator[bytes]:
        """The hashes of all values of this format."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connections."""

    async def find(self) -> None:
        """Learns what is there, as far as the store tells it at once; no event."""
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                async for block_hash in self._list():
                    if len(self._known) < _KNOWN and len(block_hash) == HASH_BYTES:
                        self._known[block_hash] = None
        except Exception as error:
            log.warning("what is there could not be listed", store=self.name, error=_words(error))

    @property
    def used_bytes(self) -> int:
        """Of the blocks that are known to be there."""
        return len(self._known) * self.format.block_bytes

    def hashes(self) -> list[bytes]:
        """What this process has seen there, and not missed since."""
        return list(self._known)

    def drain_events(self) -> list[KvEvent]:
        """What changed since the last call."""
        events, self._events = self._events, []
        return events

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Nothing: others decide what goes."""
        return

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Nothing."""
        return

    async def match(self, hashes: Sequence[bytes]) -> int:
        """Asks there."""
        if not hashes:
            return 0  # no operation, which would say nothing of the store's health
        answers = await self._call(partial(self._exist, hashes))
        if answers is None:
            return 0
        self._forget([each for each, there in zip(hashes, answers, strict=True) if not there])
        return next((at for at, there in enumerate(answers) if not there), len(hashes))

    async def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fetches blocks, verifies them and copies them where they belong."""
        check_batch(self.format, hashes, into)
        return await to_its_end(self._get(hashes, into))

    async def _get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        found = [False] * len(hashes)
        wrong: list[bytes] = []
        for start, end in self._batches(len(hashes)):
            fetched = await self._call(partial(self._fetch_and_open, hashes[start:end], into[start:end]))
            if fetched is None:
                break
            values, opened = fetched
            found[start:end] = opened
            wrong += [
                each
                for each, value, is_right in zip(hashes[start:end], values, opened, strict=True)
                if value is not None and not is_right
            ]
            missed = [each for each, value in zip(hashes[start:end], values, strict=True) if value is None]
            self._forget(missed)
        self._learn([each for each, is_there in zip(hashes, found, strict=True) if is_there])
        if wrong:
            self.counts.corrupt += len(wrong)
            await self.delete(wrong)
        self.counts.read_seconds = self._read_time.seconds
        self.counts.read_bytes += sum(found) * self.format.block_bytes
        self.counts.hits += sum(found)
        self.counts.misses += len(found) - sum(found)
        return found

    async def _fetch_and_open(
        self, hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> tuple[list[Any], list[bool]]:
        with self._read_time.running():
            values = await self._fetch(hashes)
        return values, await asyncio.to_thread(self._open, hashes, values, into)

    def _open(self, hashes: Sequence[bytes], values: Sequence[Any], into: Sequence[memoryview]) -> list[bool]:
        return [
            value is not None and self._seal.open(block_hash, memoryview(value), memory)
            for block_hash, value, memory in zip(hashes, values, into, strict=True)
        ]

    async def put(self, hashes: Sequence[bytes], blocks: Sequence[memoryview], origin: Origin = ANYWHERE) -> list[bool]:
        """Writes what is not there. Blocks are copied first."""
        check_batch(self.format, hashes, blocks)
        if not hashes:
            return []
        own = {each for each in hashes if each not in self._writing}  # not another's that is under way
        self._writing |= own
        return await to_its_end(self._put(hashes, blocks, own))

    async def _put(self, hashes: Sequence[bytes], blocks: Sequence[memoryview], own: set[bytes]) -> list[bool]:
        there = await self._call(partial(self._exist, hashes))
        if there is None:
            self._writing -= own
            self._unwanted -= own
            self.counts.skipped += len(hashes)
            return [False] * len(hashes)
        stored = [bool(each) for each in there]
        wanted = own - self._unwanted
        missing = [at for at, each in enumerate(hashes) if not there[at] and each in wanted]
        for start, end in self._batches(len(missing)):
            some = missing[start:end]
            if asyncio.get_running_loop().time() < self._full_until:
                self.counts.skipped += len(some)
                continue
            with self._write_time.running():
                answers = await self._call(partial(self._seal_and_store, [(hashes[at], blocks[at]) for at in some]))
            for at, is_there in zip(some, answers or [False] * len(some), strict=True):
                stored[at] = is_there and hashes[at] not in self._unwanted
                self.counts.stored += stored[at]
                self.counts.skipped += not stored[at]
            if answers is not None and not all(answers):
                self._full_until = asyncio.get_running_loop().time() + _FULL_SECONDS
        self.counts.write_seconds = self._write_time.seconds
        unwanted = list(own & self._unwanted)
        stored = [is_there and each not in unwanted for each, is_there in zip(hashes, stored, strict=True)]
        self._writing -= own
        self._unwanted -= own
        self._learn([each for each, is_there in zip(hashes, stored, strict=True) if is_there])
        if unwanted:
            await self.delete(unwanted)
        return stored

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """Where the store cannot be reached they stay there, until their time is over."""
        self._unwanted.update(each for each in hashes if each in self._writing)
        self._forget(hashes)
        if hashes:
            await self._call(partial(self._remove, hashes))

    async def clear(self) -> None:
        """Removes all blocks of this format, whoever wrote them. Raises StoreError if the store does not do it.

        They go while they are listed: what is interrupted has less to do the next time.
        """
        self._unwanted |= self._writing
        self._known.clear()
        self._events.append(CacheCleared())
        try:
            found: list[bytes] = []
            async for block_hash in self._list():
                found.append(block_hash)
                if len(found) == _REMOVED_AT_ONCE:
                    await self._remove(found)
                    found = []
            if found:
                await self._remove(found)
        except Exception as error:
            raise StoreError(f"the {self.name} tier could not be cleared ({_words(error)}): try again") from error

    async def _seal_and_store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        def seal() -> list[tuple[bytes, bytes]]:
            return [(each, self._seal.close(each, block)) for each, block in blocks]

        values = await asyncio.to_thread(seal)
        stored = await self._store(values)
        written = [len(value) for (_, value), is_there in zip(values, stored, strict=True) if is_there]
        self.counts.written_bytes += len(written) * self.format.block_bytes
        self.counts.packed_bytes += sum(written)
        return stored

    async def _call(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """What the store answers; None if it fails, or is not asked."""
        if self._waiting >= _WAITING or not self.breaker.passes():
            return None
        self._waiting += 1
        try:
            answer = await operation()
        except Exception as error:
            was_open = self.breaker.is_open
            self.counts.faults += 1
            self.breaker.failed()
            if self.breaker.is_open and not was_open:
                log.warning("tier left alone for a while", store=self.name, error=_words(error))
            return None
        finally:
            self._waiting -= 1
        self.breaker.succeeded()
        return answer

    def _batches(self, count: int) -> list[tuple[int, int]]:
        step = max(1, _BATCH // (self.format.block_bytes + SEAL_BYTES))
        return list(pairwise([*range(0, count, step), count]))

    def _learn(self, hashes: Sequence[bytes]) -> None:
        new = [each for each in hashes if each not in self._known]
        if new:
            self._known.update(dict.fromkeys(new))
            self._events.append(BlockStored(new))
        if len(self._known) > _KNOWN:
            self._forget(list(self._known)[: len(self._known) - _KNOWN])

    def _forget(self, hashes: Sequence[bytes]) -> None:
        known = [each for each in hashes if each in self._known]
        if known:
            for block_hash in known:
                self._known.pop(block_hash, None)
            self._events.append(BlockRemoved(known))


def _words(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
