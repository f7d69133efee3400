"""Beneath host memory: blocks are written behind, come back when they are asked for, and stay away once dropped."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch
from store import Store as RedisServer

from engine.engine import StepOutput
from engine.kv_cache import KVCacheSpec
from engine.request import HOST, BlockStored, KvEvent
from engine.scheduler import NothingToFetch
from kv_transfer.tiers.announced import Announced
from kv_transfer.tiers.disk import DiskStore
from kv_transfer.tiers.policies import POLICIES, policy_of
from kv_transfer.tiers.redis_store import RedisStore
from kv_transfer.tiers.store import BlockFormat, Store
from services.redis_client import redis_client
from services.rpc import tiers_pb2
from services.tier import below
from services.tier.ahead import Ahead
from services.tier.below import Below
from services.tier.blocks import Asked, KeptBlocks, copy_of
from services.tier.metrics import TierMetrics
from services.tier.upkeep import Upkeep
from services.worker.engine_thread import EngineThread

SPEC = KVCacheSpec(2, 4, 1, 16, torch.float32)
FORMAT = BlockFormat("model", SPEC.layout, SPEC.block_bytes)
BLOCKS = 16  # in host memory


def chain(name: str, count: int) -> list[bytes]:
    return [random.Random(f"{name} {number}").randbytes(16) for number in range(count)]


def content(block_hash: bytes) -> bytes:
    return random.Random(block_hash).randbytes(SPEC.block_bytes)


class Kept:
    """Host memory and stores beneath it, without a network."""

    def __init__(self, stores: Sequence[Store], policy: str = "lru", share: float = 1.0) -> None:
        self.stores = {each.name: each for each in stores}
        self.metrics = TierMetrics()
        self.blocks = KeptBlocks(
            "model", SPEC.layout, BLOCKS * SPEC.block_bytes, None, self.metrics, policy_of(policy, share)
        )
        self.announced = Announced((HOST, *self.stores))
        self.thread = EngineThread(self.blocks, self.on_step, self.on_crash)
        self.below = Below(self.thread, stores, self.changed)
        loop = asyncio.get_running_loop()
        self.blocks.on_used = lambda used: loop.call_soon_threadsafe(self.below.used, used, self.announced)  # type: ignore
        self.thread.start()
        self.writing = asyncio.get_running_loop().create_task(self.below.run())
        self._numbers = iter(range(10_000))

    def on_crash(self, error: Exception) -> None:
        raise error

    def on_step(self, output: StepOutput) -> None:
        if output.events:
            self.changed(HOST, output.events)
            self.below.changed_above(output.events, self.announced)

    def changed(self, tier: str, events: Sequence[KvEvent]) -> None:
        self.announced.changed(tier, events)

    async def land(self, hashes: list[bytes], root: bytes = b"") -> None:
        """These come from a worker, which has told of them if there is a root."""
        self.blocks.lineage.told(BlockStored(hashes, 0, root, root))
        request = copy_of(f"copy-{next(self._numbers)}/0", hashes, SPEC.block_size)
        tokens = len(hashes) * SPEC.block_size
        found = await self.thread.call(partial(self.blocks.reserve, request, prefix_tokens=tokens))
        assert found is not None
        for block, block_hash in zip(found.block_ids, hashes, strict=True):
            self.blocks.kv_cache.block_bytes_view(block)[:] = content(block_hash)
        await self.thread.call(partial(self.blocks.commit_prefix, request.request_id, len(hashes)))

    async def land_missing(self, hashes: list[bytes]) -> None:
        """As `land`, if not all are here."""
        with contextlib.suppress(NothingToFetch):
            await self.land(hashes, b"r" * 16)

    async def forget(self) -> None:
        """Host memory has nothing any more."""
        await self.thread.call(self.blocks.forget)

    async def written(self, hashes: list[bytes]) -> None:
        """Until all stores have these, and nothing is under way."""
        await until(lambda: all(self.announced.held(name) >= set(hashes) for name in self.stores))
        await until(lambda: self.blocks.stats().free_blocks == BLOCKS)

    async def read(self, hashes: list[bytes], furthest: str = "") -> tuple[int, dict[str, int]]:
        """How many leading ones a worker would get, all right, and how many came from where."""
        async with self.below.promoted(copy_of("ask/0", hashes, SPEC.block_size), furthest) as found:
            request = copy_of(f"read-{next(self._numbers)}/0", hashes, SPEC.block_size)
            blocks = await self.thread.call(partial(self.blocks.pin, request))
            for block, block_hash in zip(blocks, hashes, strict=False):
                assert self.blocks.kv_cache.block_bytes_view(block) == content(block_hash)
            await self.thread.call(partial(self.blocks.release, request.request_id))
        return len(blocks), dict(found)

    async def close(self) -> None:
        self.writing.cancel()
        await asyncio.gather(self.writing, return_exceptions=True)
        self.thread.stop()
        await self.below.close()
        assert self.blocks.orphaned_blocks([]) == 0 and self.blocks.stats().blocks["active"] == 0


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Kept]:
    kept = Kept([DiskStore(tmp_path, FORMAT, 1 << 20)])
    yield kept
    await kept.close()


async def test_all_stores_get_what_lands_and_the_nearest_gives_it_back(tmp_path: Path) -> None:
    server = RedisServer()
    kept = Kept([DiskStore(tmp_path, FORMAT, 1 << 20), RedisStore(redis_client(server.url), FORMAT)])
    try:
        first, second = chain("first", 10), chain("second", 10)
        await kept.land(first)
        await kept.written(first)
        await kept.land(second)  # host memory has no room for both
        await kept.written(second)
        blocks, found = await kept.read(first)
        assert blocks == 10 and found.keys() == {"disk"}
        await kept.stores["disk"].clear()
        await kept.land(chain("third", 14))
        await kept.written(chain("third", 14))
        blocks, found = await kept.read(first)
        assert blocks == 10 and found.keys() == {"redis"}
        await until(lambda: kept.announced.held("disk") >= set(first[10 - found["redis"] :]))  # it is there again, too
        fourth = chain("fourth", 14)
        await kept.land(fourth)
        await kept.written(fourth)
        await kept.land(second)
        await kept.written(second)
        await kept.stores["disk"].delete(fourth[8:9])
        blocks, found = await kept.read(fourth)
        assert blocks == 14 and found.keys() == {"disk", "redis"}
        server.stop()  # while it is down the disk goes on
        await kept.land(chain("fifth", 14))
        await until(lambda: kept.announced.held("disk") >= set(chain("fifth", 14)))
        assert (await kept.read(second))[0] == 10
    finally:
        server.stop()
        await kept.close()


async def test_a_prefix_that_is_larger_than_host_memory_comes_back_in_part(disk: Kept) -> None:
    long = chain("long", 3 * BLOCKS)
    for start in range(0, len(long), BLOCKS - 1):
        await disk.land(long[start : start + BLOCKS - 1])
        await disk.written(long[start : start + BLOCKS - 1])
    blocks, found = await disk.read(long)
    assert blocks == BLOCKS - 1 and found["disk"] == BLOCKS - 1


async def test_promotes_of_one_prefix_are_one(disk: Kept) -> None:
    prefix = chain("shared", 10)
    await disk.land(prefix)
    await disk.written(prefix)
    await disk.land(chain("other", BLOCKS - 1))
    await disk.written(chain("other", BLOCKS - 1))
    there = await disk.thread.call(partial(disk.blocks.num_leading, prefix))
    answers = await asyncio.gather(*(disk.read(prefix) for _ in range(4)))
    assert [blocks for blocks, _ in answers] == [10] * 4
    assert disk.stores["disk"].counts.hits == 10 - there == sum(sum(found.values()) for _, found in answers)


async def test_what_was_dropped_while_it_was_written_or_read_does_not_come_back(disk: Kept) -> None:
    """Whenever a drop comes between."""
    for turn in range(16):
        prefix = chain(f"turn {turn}", 8)
        await disk.land(prefix)
        for _ in range(turn % 10):
            await asyncio.sleep(0)
        await disk.below.drop(disk.forget)
        for _ in range(3):
            await disk.thread.call(lambda: None)
            await asyncio.sleep(0.01)
        assert not disk.stores["disk"].hashes() and (await disk.read(prefix))[0] == 0
        await disk.land(prefix)
        await until(lambda hashes=set(prefix): disk.announced.held("disk") >= hashes)  # type: ignore[misc]
        await disk.thread.call(disk.blocks.forget)
        reading = asyncio.get_running_loop().create_task(disk.read(prefix))
        for _ in range(turn):
            await asyncio.sleep(0)
        await disk.below.drop(disk.forget)
        await reading
        assert await disk.thread.call(partial(disk.blocks.num_leading, prefix)) == 0


async def test_what_has_been_read_when_host_memory_forgets_stays_away(
    disk: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what is asked for while the disk is emptied come back."""
    prefix = chain("prefix", 8)
    await disk.land(prefix)
    await disk.written(prefix)
    await disk.forget()
    store, loop, go = disk.stores["disk"], asyncio.get_running_loop(), asyncio.Event()
    get, clear, forget = store.get, store.clear, disk.blocks.forget

    async def get_late(hashes: list[bytes], into: list[memoryview]) -> list[bool]:
        found = await get(hashes, into)
        await go.wait()
        return found

    def forget_slowly() -> tuple[list[bytes], list[KvEvent]]:
        forgotten = forget()
        loop.call_soon_threadsafe(go.set)
        time.sleep(0.2)  # what was read is handed on meanwhile
        return forgotten

    async def clear_after_another() -> None:
        assert (await disk.read(prefix))[0] == 0
        await clear()

    monkeypatch.setattr(store, "get", get_late)
    monkeypatch.setattr(store, "clear", clear_after_another)
    monkeypatch.setattr(disk.blocks, "forget", forget_slowly)
    reading = loop.create_task(disk.read(prefix))
    await until(lambda: store.counts.hits == 8)
    upkeep: Any = Upkeep(disk.thread, disk.below, None, None, None, partial(disk.changed, HOST))  # type: ignore
    assert (await upkeep.Drop(tiers_pb2.DropRequest(), None)).blocks == 8
    assert (await reading)[0] == 0
    assert await disk.thread.call(partial(disk.blocks.num_leading, prefix)) == 0 and not store.hashes()


@pytest.mark.parametrize("policy", sorted(name for name in POLICIES if "second" not in name))
async def test_whatever_goes_first_the_books_balance(policy: str) -> None:
    dice, kept = random.Random(policy), Kept([], policy)
    try:
        for _ in range(200):
            prefix = chain(f"prompt {dice.randrange(8)}", dice.randint(1, 9))
            if dice.random() < 0.6:
                await kept.land_missing(prefix)
            asked = copy_of("ask/0", prefix, SPEC.block_size)
            if await kept.thread.call(partial(kept.blocks.hold_cached, asked)):
                await kept.thread.call(partial(kept.blocks.release, "ask/0"))
            if dice.random() < 0.02:
                kept.changed(HOST, (await kept.thread.call(kept.blocks.forget))[1])
            await kept.thread.call(kept.blocks._pool.check)
            assert len(kept.blocks._kept._policy) == len(kept.blocks.snapshot_hashes()) <= BLOCKS
        await until(lambda: kept.announced.held(HOST) == set(kept.blocks.snapshot_hashes()))
    finally:
        await kept.close()


async def test_what_is_asked_for_again_stays_with_lfu() -> None:
    kept = Kept([], "lfu")
    try:
        often = chain("often", 4)
        await kept.land(often)
        for number in range(3):
            assert await kept.thread.call(partial(kept.blocks.hold_cached, copy_of(f"a{number}", often, 4)))
            await kept.thread.call(partial(kept.blocks.release, f"a{number}"))
        for number in range(5):  # all younger
            await kept.land(chain(f"once {number}", 6))
        assert await kept.thread.call(partial(kept.blocks.num_leading, often)) == 4
    finally:
        await kept.close()


async def test_a_tenant_beyond_its_share_gives_room_to_itself(tmp_path: Path) -> None:
    """In host memory and on disk: whose a block is comes with workers' events."""
    room = 4096 + 16 * 4096
    kept = Kept([DiskStore(tmp_path, FORMAT, room, share=0.5)], share=0.5)
    try:
        modest = chain("modest", 4)
        await kept.land(modest, b"m" * 16)
        await kept.written(modest)
        for number in range(5):
            greedy = chain(f"greedy {number}", 6)
            await kept.land(greedy, b"g" * 16)
            await until(lambda: kept.blocks.stats().free_blocks == BLOCKS)
        await asyncio.sleep(0.1)
        assert await kept.thread.call(partial(kept.blocks.num_leading, modest)) == 4
        assert await kept.stores["disk"].match(modest) == 4
    finally:
        await kept.close()


async def test_the_disk_takes_what_is_asked_for_again(tmp_path: Path) -> None:
    kept = Kept([DiskStore(tmp_path, FORMAT, 1 << 20, "second_hit_lru")])
    try:
        prefix = chain("prefix", 6)
        await kept.land(prefix, b"t" * 16)
        await until(lambda: kept.stores["disk"].counts.unworthy == 6)
        assert await kept.thread.call(partial(kept.blocks.hold_cached, copy_of("ask/0", prefix, SPEC.block_size)))
        await kept.thread.call(partial(kept.blocks.release, "ask/0"))
        await kept.written(prefix)
        assert kept.stores["disk"].counts.stored == 6
    finally:
        await kept.close()


async def test_what_would_come_too_late_is_not_read_any_further(disk: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prefix whose first part shows that the rest is sooner computed, that part alone comes."""
    monkeypatch.setattr(below, "PART_BYTES", 2 * SPEC.block_bytes)
    hashes = chain("late", 8)
    await disk.land(hashes)
    await disk.written(hashes)
    await disk.thread.call(disk.blocks.clear_cache)
    late = msgspec.structs.replace(copy_of("ask/0", hashes, SPEC.block_size), deadline=time.monotonic())
    async with disk.below.promoted(late) as found:
        assert found == {"disk": 2}
    assert await disk.read(hashes) == (8, {"disk": 6})  # who has time gets the rest


def counted(kept: Kept, what: str, **labels: str) -> float:
    for name, store in kept.stores.items():
        kept.metrics.counted(name, store.counts)
    return kept.metrics.registry.get_sample_value(f"tandem_tier_{what}_total", labels) or 0.0


async def test_what_is_asked_for_is_counted_where_it_was(disk: Kept) -> None:
    hashes, size = chain("some", 6), SPEC.block_size
    await disk.land(hashes[:4])
    request = copy_of("ask/0", hashes, size)
    disk.blocks.asked["ask/0"] = Asked(size, 6 * size, {"disk": 2})  # a worker that has the first
    assert await disk.thread.call(partial(disk.blocks.hold_cached, request)) == 4 * size
    await disk.thread.call(partial(disk.blocks.release, "ask/0"))
    hits = {tier: counted(disk, "hit_blocks", tier=tier) for tier in ("disk", HOST)}
    assert hits == {"disk": 2, HOST: 1} and counted(disk, "missed_blocks") == 2
    assert await disk.thread.call(partial(disk.blocks.hold_cached, copy_of("ask/1", chain("other", 3), size))) == 0
    assert counted(disk, "missed_blocks") == 5
    await disk.written(hashes[:4])


async def test_what_a_store_lacks_when_it_comes_back_is_written_then() -> None:
    """Nobody has to use it meanwhile. What it did not take is counted, and what is wrong when it is read."""
    server = RedisServer()
    kept = Kept([RedisStore(redis_client(server.url), FORMAT)])
    store = kept.stores["redis"]
    try:
        server.stop()
        hashes = chain("some", 10)
        await kept.land(hashes)
        await until(lambda: store.breaker.is_open)
        assert counted(kept, "skipped_blocks", tier="redis") >= 6 and counted(kept, "faults", tier="redis") >= 3
        assert not kept.announced.held("redis")
        server.start()
        await kept.written(hashes)
        assert counted(kept, "stored_blocks", tier="redis") == 10 == counted(kept, "stored_blocks", tier="redis")
        with redis.Redis.from_url(server.url) as client:
            (name,) = (each for each in client.scan_iter() if each.endswith(hashes[3]))
            client.set(name, bytes(len(client.get(name))))
        await kept.thread.call(kept.blocks.forget)
        blocks, found = await kept.read(hashes)
        assert (blocks, found) == (3, {"redis": 3})
        assert counted(kept, "corrupt_blocks", tier="redis") == 1
    finally:
        await kept.close()
        server.stop()


async def test_what_cannot_be_read_is_not_right(tmp_path: Path) -> None:
    """The kernel's own EIO, of a process's memory; then of a server that is down."""
    server = RedisServer()
    near, far = DiskStore(tmp_path, FORMAT, 1 << 20), RedisStore(redis_client(server.url), FORMAT)
    kept = Kept([near, far])
    try:
        hashes = chain("read", 10)
        await kept.land(hashes)
        await kept.written(hashes)
        assert await kept.below.verify() == (20, 0)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            good = os.dup(near._file._fd)
            os.dup2(memory.fileno(), near._file._fd)
        assert await kept.below.verify() == (10, 10)
        os.dup2(good, near._file._fd)
        os.close(good)
        server.stop()
        assert await kept.below.verify() == (0, 10)  # the disk has none of them any more
    finally:
        server.stop()
        await kept.close()


async def test_no_further_is_looked_than_was_asked_unless_what_is_nearer_fails(tmp_path: Path) -> None:
    server = RedisServer()
    near, far = DiskStore(tmp_path, FORMAT, 1 << 20), RedisStore(redis_client(server.url), FORMAT)
    kept = Kept([near, far])
    try:
        wanted, in_both = chain("wanted", 6), chain("in both", 6)
        for hashes in (wanted, in_both, chain("b", 8), chain("c", 8)):
            await kept.land(hashes)
            await kept.written(hashes)
        await near.delete(wanted)
        assert await kept.read(wanted, "disk") == (0, {})
        for _ in range(3):
            near.breaker.failed()
        near.breaker._shut_until = time.monotonic() + 60
        assert await kept.read(wanted, "disk") == (6, {"redis": 6})
        assert await kept.read(in_both) == (6, {"redis": 6})
    finally:
        await kept.close()
        server.stop()


@contextlib.asynccontextmanager
async def reading_ahead(kept: Kept) -> AsyncIterator[Ahead]:
    ahead = Ahead(kept.thread, kept.below, kept.metrics)
    task = asyncio.get_running_loop().create_task(ahead.run())
    yield ahead
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def prefetched(kept: Kept, outcome: str) -> float:
    return kept.metrics.tier_prefetched.labels(outcome)._value.get()


async def test_what_will_be_asked_for_is_read_ahead(disk: Kept) -> None:
    wanted = chain("wanted", 6)
    for hashes in (wanted, chain("b", 8), chain("c", 8)):
        await disk.land(hashes)
        await disk.written(hashes)
    async with reading_ahead(disk) as ahead:
        disk.below.awaited = 1  # somebody waits for a read
        assert ahead.ask(wanted)
        await asyncio.sleep(0.1)
        assert await disk.thread.call(partial(disk.blocks.num_leading, wanted)) == 0
        disk.below.awaited = 0
        await until(lambda: prefetched(disk, "read") == 6)
        assert await disk.read(wanted) == (6, {})
        ahead.used(chain("b", 8) + wanted)
        assert prefetched(disk, "used") == 6 and not prefetched(disk, "dropped")


async def test_what_others_drive_out_at_once_is_not_read_ahead_again(
    disk: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, promoted = chain("wanted", 8), disk.below.promoted
    others = (chain(f"other {number}", BLOCKS // 2) for number in range(100))
    for hashes in (wanted, next(others), next(others)):
        await disk.land(hashes)
        await disk.written(hashes)

    @contextlib.asynccontextmanager
    async def crowded(*asked: Any, **how: Any) -> AsyncIterator[Any]:
        async with promoted(*asked, **how) as found:
            yield found
        for hashes in (next(others), next(others)):
            await disk.land(hashes)
            await disk.written(hashes)

    monkeypatch.setattr(disk.below, "promoted", crowded)
    async with reading_ahead(disk) as ahead:
        assert ahead.ask(wanted)
        await until(lambda: prefetched(disk, "dropped") == 8)
        assert prefetched(disk, "read") == BLOCKS / 4


async def test_no_more_is_read_ahead_than_half_of_host_memory(disk: Kept) -> None:
    names = [chain(name, 8) for name in "abcd"]
    for wanted in names:
        await disk.land(wanted)
        await disk.written(wanted)
    async with reading_ahead(disk) as ahead:
        for wanted in names[:2]:  # those are not in host memory any more
            assert ahead.ask(wanted)
        await until(lambda: prefetched(disk, "read") + prefetched(disk, "dropped") == 16)
        assert prefetched(disk, "read") <= BLOCKS / 2
        assert not ahead.ask([])
        too_long = chain("a", 8) + chain("long", 10 * BLOCKS)  # whoever sends it does not decide what is remembered
        assert ahead.ask(too_long) and [len(each) for each in ahead._wanted.values()] == [BLOCKS]
        assert await disk.read(names[1]) == (8, {"disk": 8})  # whoever asks gets it all the same
