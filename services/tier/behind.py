"""Writes to a store beneath host memory what lands there, behind everything else."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from engine.request import BlockRemoved, BlockStored, KvEvent
from kv_transfer.tiers.store import Origin, Store
from services.tier.blocks import KeptBlocks, copy_of
from services.worker.engine_thread import EngineThread

PART_BYTES = 16 << 20  # written or read at once; the blocks are held meanwhile
_LOOK_SECONDS = 0.25  # while the store is left alone
_FAILED_SECONDS = 0.1  # of rest after a part that did not come in
_SHARE = 8  # of host memory that a part may be: what is asked for needs room meanwhile


class Behind:
    """Blocks of `thread`'s engine that `store` lacks. `tell` is called when the store may have changed.

    What does not come into a store that is out of order is written once it is well again, if it is here still. What it
    has no room or no wish for is offered again when somebody uses it.
    """

    def __init__(self, thread: EngineThread, store: Store, tell: Callable[[], None]) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self._thread = thread
        self._blocks = thread.engine
        self._store = store
        self._tell = tell
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._news = asyncio.Event()
        self._numbers = itertools.count()
        self._drops = 0

    def changed_above(self, events: Iterable[KvEvent], there: set[bytes]) -> None:
        """Host memory has changed. `there`: blocks that the store has."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._unwritten.update(dict.fromkeys(each for each in block_hashes if each not in there))
                    self._news.set()
                case BlockRemoved(block_hashes):
                    for block_hash in block_hashes:
                        self._unwritten.pop(block_hash, None)

    def drop(self) -> None:
        """Nothing that waits, or is on its way to the store, is to be written."""
        self._unwritten.clear()
        self._drops += 1

    async def run(self) -> None:
        """Writes until it is cancelled."""
        room = self._blocks.kv_cache.num_blocks // _SHARE
        count = max(1, min(room, PART_BYTES // self._store.format.block_bytes))
        while True:
            if not self._unwritten:
                self._news.clear()
                await self._news.wait()
            if pause := self._store.breaker.pause:
                await asyncio.sleep(min(pause, _LOOK_SECONDS))
                continue
            hashes = list(itertools.islice(self._unwritten, count))
            for block_hash in hashes:
                del self._unwritten[block_hash]
            if failed := await self._write(hashes):
                self._unwritten.update(dict.fromkeys(failed))
                await asyncio.sleep(_FAILED_SECONDS)

    async def _write(self, hashes: list[bytes]) -> list[bytes]:
        """Which of these did not come in, as the store failed."""
        held = copy_of(
            f"write-{self._store.name}-{next(self._numbers)}/0", hashes, self._blocks.kv_cache.spec.block_size
        )
        drops, failed = self._drops, list[bytes]()
        blocks = await self._thread.call(partial(self._blocks.pin, held))
        try:
            if drops == self._drops:
                memory = iter([self._blocks.kv_cache.block_bytes_view(block) for block in blocks])
                for origin, run in self._blocks.lineage.runs(hashes[: len(blocks)]):
                    if drops == self._drops:
                        failed += await self._put(run, list(islice(memory, len(run))), origin)
        finally:
            await self._thread.call(partial(self._blocks.release, held.request_id))
        if drops == self._drops and len(blocks) < len(hashes):
            # One is not in host memory any more; those behind it may be.
            self._unwritten.update(dict.fromkeys(hashes[len(blocks) + 1 :]))
        self._tell()
        return failed if drops == self._drops else []

    async def _put(self, run: list[bytes], blocks: list[memoryview], origin: Origin) -> list[bytes]:
        """Which are not there, while the store failed."""
        faults, was_open = self._store.counts.faults, self._store.breaker.is_open
        there = await self._store.put(run, blocks, origin)
        if self._store.counts.faults == faults and not was_open:
            return []
        return [each for each, is_there in zip(run, there, strict=True) if not is_there]
