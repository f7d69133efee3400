"""What all stores promise, and the disk tier, over restarts and damage, against a dictionary."""

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_blocks import FORMAT, content, key, room

from engine.request import BlockRemoved, BlockStored, CacheCleared
from kv_transfer.tiers.disk import DiskStore
from kv_transfer.tiers.policies import POLICIES
from kv_transfer.tiers.store import StoreError

SLOTS = 12
CAPACITY = 4096 + SLOTS * 8192
numbers = st.lists(st.integers(0, 19), min_size=1, max_size=16, unique=True)


class DiskAgainstDictionary(RuleBasedStateMachine):
    """Bytes of a block change with each deletion, so that what was deleted would be seen if it came back."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.loop = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.policy = policy
        self.version = dict.fromkeys(range(20), 0)
        self.wrote: set[int] = set()
        self.pinned: list[int] = []
        self.damaged = False
        self.open()

    def open(self) -> None:
        self.store = self.loop.run(DiskStore.open(self.folder, FORMAT, CAPACITY, self.policy))
        self.mirror = set(self.store.hashes())

    def bytes_of(self, number: int) -> memoryview:
        return content(number + 1000 * self.version[number])

    @rule(some=numbers)
    def put(self, some: list[int]) -> None:
        stored = self.loop.run(self.store.put([key(each) for each in some], [self.bytes_of(each) for each in some]))
        kept = {each for each, is_there in zip(some, stored, strict=True) if is_there}
        self.wrote |= kept
        assert kept == {each for each in some if key(each) in self.store.hashes()}
        if self.policy == "lru" and not self.pinned:
            assert len(kept) == min(len(some), SLOTS) == self.leading(some)  # heads first

    def leading(self, some: list[int]) -> int:
        return self.loop.run(self.store.match([key(each) for each in some]))

    @rule(some=numbers)
    def get(self, some: list[int]) -> None:
        into = room(len(some))
        before = set(self.store.hashes())
        found = self.loop.run(self.store.get([key(each) for each in some], into))
        for number, memory, is_there in zip(some, into, found, strict=True):
            assert is_there == (key(number) in self.store.hashes())
            if is_there:
                assert number in self.wrote and memory == self.bytes_of(number)
            else:
                assert self.damaged or key(number) not in before

    @rule(some=numbers)
    def delete(self, some: list[int]) -> None:
        self.loop.run(self.store.delete([key(each) for each in some]))
        for number in some:
            self.version[number] += 1
        self.wrote -= set(some)

    @rule()
    def clear(self) -> None:
        self.loop.run(self.store.clear())
        for number in self.version:
            self.version[number] += 1
        self.wrote.clear()

    @rule(some=numbers)
    def pin(self, some: list[int]) -> None:
        self.store.pin([key(each) for each in some[:4]])
        self.pinned += some[:4]

    @rule()
    def unpin(self) -> None:
        self.store.unpin([key(each) for each in self.pinned])
        self.pinned.clear()

    @rule()
    def restart(self) -> None:
        self.mirror_events()
        before = set(self.store.hashes())
        self.loop.run(self.store.close())
        self.pinned.clear()
        self.open()
        assert before == set(self.store.hashes()) or self.damaged

    @rule(seed=st.integers(0, 2**32))
    def damage(self, seed: int) -> None:
        (path,) = self.folder.iterdir()
        at = random.Random(seed).randrange(4096, max(4097, path.stat().st_size))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(random.Random(seed).randbytes(3))
        self.damaged = True

    def mirror_events(self) -> None:
        for event in self.store.drain_events():
            match event:
                case BlockStored(hashes):
                    assert self.mirror.isdisjoint(hashes)
                    self.mirror |= set(hashes)
                case BlockRemoved(hashes):
                    assert self.mirror >= set(hashes)
                    self.mirror -= set(hashes)
                case CacheCleared():
                    self.mirror.clear()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "store"):
            self.mirror_events()
            assert self.mirror == set(self.store.hashes()) <= {key(each) for each in self.wrote} or self.damaged
            assert len(self.mirror) == len(self.store._policy) <= SLOTS
            free, taken = set(self.store._free), set(self.store._slot_of.values())
            assert len(free) == len(self.store._free) and free.isdisjoint(taken)
            assert free | taken == set(range(self.store._file.num_slots))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.loop.run(self.store.close())
            self.loop.close()
            shutil.rmtree(self.folder)


DiskAgainstDictionary.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestDiskAgainstDictionary = DiskAgainstDictionary.TestCase


async def test_many_at_once(tmp_path: Path) -> None:
    """Batches that overlap, evict, delete and are cancelled: what is found is right, and the books balance after."""
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    rng = random.Random(5)

    async def one(turn: int) -> None:
        some = rng.sample(range(30), rng.randint(1, 10))
        keys = [key(each) for each in some]
        match turn % 4:
            case 0:
                await store.put(keys, [content(each) for each in some])
            case 3 if turn % 8 == 3:
                await store.delete(keys[:2])
            case _:
                into = room(len(some))
                for number, memory, is_there in zip(some, into, await store.get(keys, into), strict=True):
                    assert not is_there or memory == content(number)

    for start in range(0, 600, 20):
        tasks = [asyncio.ensure_future(one(turn)) for turn in range(start, start + 20)]
        await asyncio.sleep(0)
        tasks[rng.randrange(20)].cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
    assert store.counts.hits > 100 and store.counts.evicted > 100 and not store.counts.corrupt
    assert not store._writing and not store._reading and not store._left and not store._unwanted
    assert len(store._free) + len(store._slot_of) == store._file.num_slots == SLOTS
    await store.close()


async def test_batches_are_checked(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    for hashes, memory in (
        ([key(1)], []),
        ([b"short"], room(1)),
        ([key(1)], room(1, 4999)),
        ([key(1)], [memoryview(bytearray(10000))[::2]]),
    ):
        with pytest.raises(StoreError):
            await store.get(hashes, memory)
        with pytest.raises(StoreError):
            await store.put(hashes, memory)
    await store.close()


async def test_what_is_deleted_while_a_put_makes_room_stays_away(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    for forget in (lambda: store.delete([key(1)]), store.clear):
        keys = [key(1), key(2)]
        putting = asyncio.ensure_future(store.put(keys, [content(1), content(2)]))
        await asyncio.sleep(0)  # it is on its way to have the file grow
        await forget()
        assert not (await putting)[0] and key(1) not in store.hashes()
    await store.close()
