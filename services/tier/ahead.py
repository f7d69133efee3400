"""Prefetch: what a request will ask for that waits elsewhere is read into host memory before its turn comes.

Part by part, and none while something is read that somebody waits for. It is a hint: what too many ask for, or what
would take too much of host memory before anything of it is used, is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

from services.tier.behind import PART_BYTES
from services.tier.below import Below
from services.tier.blocks import KeptBlocks, copy_of
from services.tier.metrics import TierMetrics
from services.worker.engine_thread import EngineThread

_WAITING = 64  # prefixes; more are not taken
_SHARE = 2  # of host memory that may be read ahead and not used yet: one half
_UNUSED_SECONDS = 60.0  # after which nobody is expected to use it
_LOOK_SECONDS = 0.005  # while others read


class Ahead:
    """Reads from the stores of `below` into the blocks of `thread`'s engine."""

    def __init__(self, thread: EngineThread, below: Below, metrics: TierMetrics) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self._thread = thread
        self._blocks = thread.engine
        self._below = below
        self._metrics = metrics
        self._wanted: OrderedDict[bytes, list[bytes]] = OrderedDict()  # by their last block
        self._news = asyncio.Event()
        self._unused: OrderedDict[bytes, float] = OrderedDict()  # blocks that were read ahead, and when
        self._numbers = itertools.count()

    def ask(self, hashes: list[bytes]) -> bool:
        """These leading blocks of a prompt will be asked for. False: too many others are to be read.

        More of them than host memory has room for are not remembered.
        """
        hashes = hashes[: self._blocks.kv_cache.num_blocks]
        if not hashes or len(self._wanted) >= _WAITING:
            self._metrics.tier_prefetched.labels("dropped").inc(len(hashes))
            return False
        self._wanted[hashes[-1]] = hashes
        self._news.set()
        return True

    def used(self, hashes: Iterable[bytes]) -> None:
        """A worker has got these."""
        used = sum(self._unused.pop(each, None) is not None for each in hashes)
        self._metrics.tier_prefetched.labels("used").inc(used)

    async def run(self) -> None:
        """Reads until it is cancelled."""
        while True:
            if not self._wanted:
                self._news.clear()
                await self._news.wait()
            _, hashes = self._wanted.popitem(last=False)
            await self._read(hashes)

    async def _read(self, hashes: list[bytes]) -> None:
        size, num_blocks = self._blocks.kv_cache.spec.block_size, self._blocks.kv_cache.num_blocks
        part = max(2, min(num_blocks // (2 * _SHARE), PART_BYTES // self._below.stores[0].format.block_bytes))
        before = -1
        while True:
            while self._below.awaited:
                await asyncio.sleep(_LOOK_SECONDS)
            there = await self._thread.call(partial(self._blocks.num_leading, hashes))
            if there >= len(hashes):
                return
            now = time.monotonic()
            while self._unused and now - next(iter(self._unused.values())) > _UNUSED_SECONDS:
                self._unused.popitem(last=False)
            # What went again while more was read would go once more.
            if there <= before or len(self._unused) + part > num_blocks // _SHARE:
                self._metrics.tier_prefetched.labels("dropped").inc(len(hashes) - there)
                return
            before = there
            copy = copy_of(f"ahead-{next(self._numbers)}/0", hashes[: there + part], size)
            async with self._below.promoted(copy, is_awaited=False) as found:
                pass
            if not (read := sum(found.values())):
                return
            self._unused.update(dict.fromkeys(hashes[there : there + read], now))
            self._metrics.tier_prefetched.labels("read").inc(read)
