"""The tiers beneath host memory: what they have comes back into it when it is asked for.

Whatever fails is a miss, and a block that is not kept.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from engine.request import BlockStored, KvEvent, Request
from engine.scheduler import NothingToFetch
from kv_transfer.tiers.announced import Announced
from kv_transfer.tiers.store import Store, StoreError
from services.tier.behind import PART_BYTES, Behind
from services.tier.blocks import KeptBlocks, copy_of
from services.worker.engine_thread import EngineThread

_LEAST_READ = 2  # blocks: fewer are sooner computed
_WAY = 1.25  # times what reading takes: what was read goes on to a worker
_MOST_RUNS = 16  # of blocks of one store, in one prefix

Run = tuple[Store, int]  # a store, and how many blocks it has there


class Below:
    """`stores` beneath the blocks of `thread`'s engine, nearest first. `on_change` gets their events by their names."""

    def __init__(
        self, thread: EngineThread, stores: Sequence[Store], on_change: Callable[[str, Sequence[KvEvent]], None]
    ) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self.stores = stores
        self._thread = thread
        self._blocks = thread.engine
        self._on_change = on_change
        self._behind = {each.name: Behind(thread, each, partial(self._tell, each)) for each in stores}
        # By the first block that comes; in the end the stores that were read.
        self._promoting: dict[bytes, asyncio.Future[list[str]]] = {}
        self._numbers = itertools.count()
        self._drops = 0
        self._dropping = 0  # drops under way
        self.awaited = 0  # reads for which somebody waits

    def changed_above(self, events: Sequence[KvEvent], announced: Announced) -> None:
        """Host memory has changed."""
        for name, behind in self._behind.items():
            behind.changed_above(events, announced.held(name))

    def used(self, hashes: list[bytes], announced: Announced) -> None:
        """A worker got these from host memory: stores that lack them, as they were refused or have gone, may do now."""
        self.changed_above([BlockStored(hashes)], announced)

    async def run(self) -> None:
        """Writes what lands in host memory until it is cancelled. A slow store holds up no other."""
        async with asyncio.TaskGroup() as writers:
            for behind in self._behind.values():
                writers.create_task(behind.run())

    @asynccontextmanager
    async def promoted(
        self, request: Request, furthest: str = "", *, is_awaited: bool = True
    ) -> AsyncIterator[Counter[str]]:
        """Brings blocks of the request into host memory, behind those that are there, and holds them meanwhile.

        How many by store, no further away than `furthest`, or in the next one if one fails; empty: of all stores. Where
        host memory has no room for all of them, or they would not come by the request's deadline, the leading ones.
        `is_awaited`: by somebody. Stores of which others read a block that this request waited for count 0.
        """
        hashes, stores = self._blocks.hashes_of(request), self._num_stores(furthest)
        found: Counter[str] = Counter()
        there = await self._thread.call(partial(self._blocks.num_leading, hashes))
        while there < len(hashes) and (under_way := self._promoting.get(hashes[there])) is not None:
            found.update(dict.fromkeys(await asyncio.shield(under_way), 0))
            there = await self._thread.call(partial(self._blocks.num_leading, hashes))
        held = ""
        try:
            if there < len(hashes):
                over = self._promoting[hashes[there]] = asyncio.get_running_loop().create_future()
                self.awaited += is_awaited
                try:
                    held = await self._promote(hashes, there, stores, found, request.deadline)
                finally:
                    self.awaited -= is_awaited
                    del self._promoting[hashes[there]]
                    over.set_result(list(found))
            yield found
        finally:
            if held:
                await self._thread.call(partial(self._blocks.release, held))

    def _num_stores(self, furthest: str) -> int:
        names = [each.name for each in self.stores]
        return names.index(furthest) + 1 if furthest in names else len(names)

    async def _promote(self, hashes: list[bytes], there: int, stores: int, found: Counter[str], deadline: float) -> str:
        """The id under which what is in host memory then is held; empty: nothing has come."""
        if self._dropping:
            return ""
        drops = self._drops
        runs = await self._find(hashes[there:], stores)
        room = await self._thread.call(partial(self._blocks.room_behind, hashes[:there]))
        known = there + min(room, sum(count for _, count in runs))
        if known < there + _LEAST_READ:
            return ""
        name, size = f"promote-{next(self._numbers)}/0", self._blocks.kv_cache.spec.block_size
        copy = copy_of(name, hashes[:known], size)
        try:
            reservation = await self._thread.call(partial(self._blocks.reserve, copy, prefix_tokens=known * size))
        except NothingToFetch:
            return ""
        if reservation is None:
            return ""
        cached, end, held = reservation.num_cached_blocks, 0, ""
        memory = [self._blocks.kv_cache.block_bytes_view(block) for block in reservation.block_ids]
        try:
            if cached >= there:  # else some of them went meanwhile
                end = await self._read(runs, hashes[:known], memory, there, cached, found, deadline)
        finally:
            if end > cached and drops == self._drops:
                held = f"held-{name}"
                kept = partial(self._blocks.commit_and_pin, name, end, copy_of(held, hashes[:end], size))
                await self._thread.call(kept)
            else:
                found.clear()
                await self._thread.call(partial(self._blocks.recompute, name))
        return held

    async def _find(self, hashes: Sequence[bytes], stores: int) -> list[Run]:
        """Which of the first `stores` has which of these blocks, as far as there is one for each.

        For each that fails the next one may be asked.
        """
        runs: list[Run] = []
        at = 0
        while at < len(hashes) and len(runs) < _MOST_RUNS:
            for place, store in enumerate(self.stores):
                if place >= stores:
                    continue
                faults = store.counts.faults
                count = await store.match(hashes[at:])
                stores += store.breaker.is_open or store.counts.faults > faults
                self._tell(store)  # what it has lost meanwhile
                if count:
                    runs.append((store, count))
                    at += count
                    break
            else:
                break
        return runs

    async def _read(
        self,
        runs: Iterable[Run],
        hashes: Sequence[bytes],
        memory: Sequence[memoryview],
        there: int,
        cached: int,
        found: Counter[str],
        deadline: float,
    ) -> int:
        """Reads blocks from `cached` on until one is missing; where that is. `runs` begin at `there`.

        In parts, and no further once it shows that the rest of a run would come too late.
        """
        at, most = there, max(1, PART_BYTES // self.stores[0].format.block_bytes)
        for store, count in runs:
            start, end = max(at, cached), min(at + count, len(hashes))
            at = end
            if start >= end:
                continue
            began, first = time.monotonic(), start
            while start < end:
                part = min(end, start + most)
                whole = await store.get(hashes[start:part], memory[start:part])
                self._tell(store)
                right = next((number for number, is_there in enumerate(whole) if not is_there), len(whole))
                found[store.name] += right
                if right < part - start:
                    return start + right
                now, start = time.monotonic(), part
                if now + _WAY * (end - start) * (now - began) / (start - first) > deadline:
                    return start
        return at

    async def verify(self) -> tuple[int, int]:
        """Reads all blocks, in parts: how many are right, and how many were not, or could not be read.

        What is wrong is removed, and what a disk fails to read. What went meanwhile is neither.
        """
        right = wrong = 0
        for store in self.stores:
            hashes, size = store.hashes(), store.format.block_bytes
            count = max(1, PART_BYTES // size)
            room = memoryview(bytearray(min(count, max(1, len(hashes))) * size))
            for start in range(0, len(hashes), count):
                part = hashes[start : start + count]
                corrupt, faults = store.counts.corrupt, store.counts.faults
                found = sum(await store.get(part, [room[at * size :][:size] for at in range(len(part))]))
                self._tell(store)
                right += found
                fails = store.breaker.is_open or store.counts.faults > faults
                wrong += len(part) - found if fails else store.counts.corrupt - corrupt
        return right, wrong

    async def drop(self, forget: Callable[[], Awaitable[None]]) -> None:
        """Forgets all blocks of the stores, what is on its way from and to them, and by `forget` what is above them.

        Nothing comes back into host memory until it is over. Raises StoreError.
        """
        self._dropping += 1
        errors = []
        try:
            self._end_under_way()
            await forget()
            self._end_under_way()  # also what came into host memory just before
            for store in self.stores:
                try:
                    await store.clear()
                except StoreError as error:
                    errors.append(str(error))
                self._tell(store)
        finally:
            self._dropping -= 1
        if errors:
            raise StoreError("; ".join(errors))

    def _end_under_way(self) -> None:
        self._drops += 1
        for behind in self._behind.values():
            behind.drop()

    async def close(self) -> None:
        """Ends what is under way."""
        for store in self.stores:
            await store.close()

    def _tell(self, store: Store) -> None:
        if events := store.drain_events():
            self._on_change(store.name, events)
