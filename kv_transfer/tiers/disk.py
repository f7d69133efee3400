"""A tier on a local disk: the index of a file of slots (`slot_file`), the threads that read and write it, a policy.

Opening it finds the blocks of the process before. Reads and writes have threads of their own, so that a restore does
not wait behind what is written in the background. A failing disk makes misses; after some faults in a row it is left
alone for a while. Buffered: bench/results/2026-11-29-tier-disk.md has the figures.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import structlog

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from kv_transfer.tiers.breaker import Breaker
from kv_transfer.tiers.policies import POLICIES, policy_of
from kv_transfer.tiers.policies.base import Arrival
from kv_transfer.tiers.slot_file import Footer, SlotFile
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

_READERS, _WRITERS = 4, 2  # threads
_WRITING = 512 << 20  # bytes of blocks that may be on their way to the file; more are not taken
_FULL_SECONDS = 10.0  # after which a file that could not grow is tried again


class DiskStore:
    """A `Store` in a file of its own in `folder`, of at most `capacity_bytes`. Opening it reads all footers.

    `share`: of it that one owner's blocks may take while others want room. Raises StoreError if the folder cannot be
    used, another process has the file, or no block would fit.
    """

    name = "disk"

    def __init__(
        self, folder: Path, format: BlockFormat, capacity_bytes: int, policy: str = "lru", share: float = 1.0
    ) -> None:
        if policy not in POLICIES:
            raise StoreError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
        self.format = format
        self.counts = StoreCounts()
        self.capacity_bytes = capacity_bytes
        self._file = SlotFile(folder, format, capacity_bytes)
        self._policy = policy_of(policy, share)(self._file.max_slots)
        self._slot_of: dict[bytes, int] = {}
        self._free: list[int] = []
        self._writing: set[bytes] = set()
        self._unwanted: set[bytes] = set()  # deleted while they were written
        self._offered: dict[int, set[bytes]] = {}  # by `put` that waits for room, less what was deleted meanwhile
        self._puts = 0
        self._reading: Counter[int] = Counter()  # slots
        self._left: set[int] = set()  # slots of nobody that are still read
        self._pins: Counter[bytes] = Counter()
        self._events: list[KvEvent] = []
        self.breaker = Breaker()
        self._readers = ThreadPoolExecutor(_READERS, "disk-read")
        self._writers = ThreadPoolExecutor(_WRITERS, "disk-write")
        self._growing = asyncio.Lock()
        self._full_until = 0.0
        self._read_time, self._write_time = Stopwatch(), Stopwatch()
        self._sequence = 0
        self._find()

    @classmethod
    async def open(
        cls, folder: Path, format: BlockFormat, capacity_bytes: int, policy: str = "lru", share: float = 1.0
    ) -> "DiskStore":
        """Without keeping the event loop waiting."""
        return await asyncio.to_thread(cls, folder, format, capacity_bytes, policy, share)

    def _find(self) -> None:
        """What an earlier process left. Of two slots with one block the later counts."""
        found = sorted(self._file.scan(), key=lambda each: -each[1].sequence)
        kept: list[Footer] = []
        for slot, footer in found:
            if footer.key not in self._slot_of:
                self._slot_of[footer.key] = slot
                kept.append(footer)
        for footer in reversed(kept):
            self._policy.insert(Arrival(footer.key, footer.position, footer.parent, footer.owner))
        self._sequence = kept[0].sequence + 1 if kept else 0
        taken = set(self._slot_of.values())
        self._free = [slot for slot in reversed(range(self._file.num_slots)) if slot not in taken]
        if kept:
            log.info("disk tier found blocks", path=str(self._file.path), blocks=len(kept))

    @property
    def used_bytes(self) -> int:
        """Of the blocks that are there."""
        return len(self._slot_of) * self.format.block_bytes

    def hashes(self) -> list[bytes]:
        """All blocks that are there."""
        return list(self._slot_of)

    def drain_events(self) -> list[KvEvent]:
        """What changed since the last call."""
        events, self._events = self._events, []
        return events

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Not to be evicted."""
        self._pins.update(hashes)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Ends one `pin` of each."""
        self._pins.subtract(hashes)
        for block_hash in hashes:
            if self._pins[block_hash] <= 0:
                del self._pins[block_hash]

    async def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are there; none while the disk is left alone, so that others are asked."""
        if self.breaker.pause:
            return 0
        return next((at for at, each in enumerate(hashes) if each not in self._slot_of), len(hashes))

    async def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Reads blocks and verifies them. Takes as long as the disk does."""
        check_batch(self.format, hashes, into)
        return await to_its_end(self._get(hashes, into))

    async def _get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        slots = {at: self._slot_of[each] for at, each in enumerate(hashes) if each in self._slot_of}
        wanted = list(slots)
        outcome: dict[int, bool | OSError] = {}
        if wanted and self.breaker.passes():
            self._reading.update(slots.values())
            with self._read_time.running():
                read = self._file.read
                outcome = await self._each(self._readers, wanted, lambda at: read(slots[at], hashes[at], into[at]))
            self.counts.read_seconds = self._read_time.seconds
            self._let_go(slots.values())
        for at in reversed(wanted):
            if outcome.get(at) is True:
                self.counts.read_bytes += self.format.block_bytes
                if hashes[at] in self._slot_of:
                    self._policy.touch(hashes[at])
            elif at in outcome and self._slot_of.get(hashes[at]) == slots[at]:
                self.counts.corrupt += not isinstance(outcome[at], OSError)
                await self._drop([hashes[at]])
        found = [outcome.get(at) is True for at in range(len(hashes))]
        self.counts.hits += sum(found)
        self.counts.misses += len(found) - sum(found)
        return found

    async def put(self, hashes: Sequence[bytes], blocks: Sequence[memoryview], origin: Origin = ANYWHERE) -> list[bool]:
        """Writes what is not there and worth it. What is being written already counts as not there yet."""
        check_batch(self.format, hashes, blocks)
        self._puts += 1
        self._offered[self._puts] = set(hashes)
        return await to_its_end(self._put(hashes, blocks, origin, self._puts))

    async def _put(
        self, hashes: Sequence[bytes], blocks: Sequence[memoryview], origin: Origin, number: int
    ) -> list[bool]:
        try:
            if missing := len({each for each in hashes if each not in self._slot_of}):
                await self._grow(missing)
        finally:
            offered = self._offered.pop(number)
        for block_hash in reversed(hashes):
            if block_hash in self._slot_of:
                self._policy.touch(block_hash)
        planned = self._plan(hashes, origin, offered)
        outcome: dict[int, bool | OSError] = {}
        if planned:
            footers = {at: self._footer(planned[at][1]) for at in reversed(planned)}  # heads are the latest

            def write(at: int) -> bool:
                self._file.write(planned[at][0], footers[at], blocks[at])
                return True

            with self._write_time.running():
                outcome = await self._each(self._writers, list(planned), write)
            self.counts.write_seconds = self._write_time.seconds
        failed = []
        for at in reversed(planned):
            slot, arrival = planned[at]
            self._writing.discard(arrival.key)
            if outcome[at] is True and arrival.key not in self._unwanted:
                self._slot_of[arrival.key] = slot
                self._policy.insert(arrival)
                self.counts.stored += 1
                self.counts.written_bytes += self.format.block_bytes
            else:
                self._unwanted.discard(arrival.key)
                self.counts.skipped += 1
                failed.append(slot)
        stored = [hashes[at] for at in planned if hashes[at] in self._slot_of]
        if stored:
            self._events.append(BlockStored(stored))
        await self._erase(failed)
        return [each in self._slot_of for each in hashes]

    def _plan(self, hashes: Sequence[bytes], origin: Origin, offered: set[bytes]) -> dict[int, tuple[int, Arrival]]:
        """A slot for each block that is to be written, heads first."""
        heads: set[bytes] = set()  # nothing of this prompt goes for what comes behind it
        planned: dict[int, tuple[int, Arrival]] = {}
        for at, block_hash in enumerate(hashes):
            heads.add(block_hash)
            if block_hash in self._slot_of or block_hash in self._writing or block_hash not in offered:
                continue
            parent = hashes[at - 1] if at else origin.parent
            arrival = Arrival(block_hash, origin.position + at, parent, origin.owner)
            if not self._policy.admits(arrival):
                self.counts.unworthy += 1
                continue
            if (len(self._writing) + 1) * self.format.block_bytes > max(_WRITING, self.format.block_bytes) or (
                self.breaker.is_open and not (not planned and self.breaker.passes())
            ):
                self.counts.skipped += 1
                continue
            if not self._free and not self._evict(arrival, heads):
                self.counts.skipped += 1
                continue
            self._writing.add(block_hash)
            planned[at] = self._free.pop(), arrival
        return planned

    def _evict(self, arrival: Arrival, heads: set[bytes]) -> bool:
        """Whether a slot became free for it."""

        def held(key: bytes) -> bool:
            return key in self._pins or key in heads or self._slot_of[key] in self._reading

        victim = self._policy.evict(arrival, held)
        if victim is None:
            return False
        self._free.append(self._slot_of.pop(victim))
        self._events.append(BlockRemoved([victim]))
        self.counts.evicted += 1
        return True

    def _footer(self, arrival: Arrival) -> Footer:
        self._sequence += 1
        return Footer(self._sequence, arrival.key, arrival.position, arrival.parent, arrival.owner)

    async def _grow(self, missing: int) -> None:
        """Makes room for so many blocks, as far as the bounds allow."""
        async with self._growing:
            while len(self._free) < missing and time.monotonic() >= self._full_until:
                before = self._file.num_slots
                try:
                    grown = await asyncio.get_running_loop().run_in_executor(self._writers, self._file.grow)
                except OSError as error:
                    self._fault(error)
                    grown = 0
                self._free[:0] = reversed(range(before, before + grown))
                if not grown:
                    self._full_until = time.monotonic() + _FULL_SECONDS

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """Forgets blocks; their slots are written again later."""
        self._unwanted.update(each for each in hashes if each in self._writing)
        for offered in self._offered.values():
            offered.difference_update(hashes)
        await to_its_end(self._drop(hashes))

    async def clear(self) -> None:
        """Forgets all blocks at once. Raises StoreError if the disk does not take that in."""
        self._unwanted |= self._writing
        for offered in self._offered.values():
            offered.clear()
        for block_hash, slot in self._slot_of.items():
            self._policy.remove(block_hash)
            self._leave(slot)
        self._slot_of.clear()
        self._events.append(CacheCleared())
        erasing = asyncio.get_running_loop().run_in_executor(self._writers, self._file.erase_all)
        try:
            await to_its_end(erasing)
        except OSError as error:
            self._fault(error)
            raise StoreError(f"{self._file.path} cannot be cleared ({error.strerror}): remove it") from error

    async def close(self) -> None:
        """Waits for reads and writes under way."""
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._writers.shutdown)
        self._file.close()

    async def _drop(self, hashes: Sequence[bytes]) -> None:
        """Forgets those blocks that are there, here and in the file."""
        there = [each for each in dict.fromkeys(hashes) if each in self._slot_of]
        if there:
            for block_hash in there:
                self._policy.remove(block_hash)
            self._events.append(BlockRemoved(there))
            await self._erase([self._slot_of.pop(each) for each in there])

    async def _erase(self, slots: Sequence[int]) -> None:
        """The slots become free, if the disk takes in that they hold nothing; otherwise they are not used again."""
        if not slots:
            return

        def erase(slot: int) -> bool:
            self._file.erase(slot)
            return True

        outcome = await self._each(self._writers, slots, erase)
        for slot in slots:
            if outcome[slot] is True:
                self._leave(slot)

    def _leave(self, slot: int) -> None:
        if slot in self._reading:
            self._left.add(slot)
        else:
            self._free.append(slot)

    def _let_go(self, slots: Iterable[int]) -> None:
        self._reading.subtract(slots)
        self._reading = +self._reading
        self._free += self._left - self._reading.keys()
        self._left &= self._reading.keys()

    async def _each(
        self, threads: Executor, items: Sequence[int], work: Callable[[int], bool]
    ) -> dict[int, bool | OSError]:
        """What `work` came to for each item, done by several threads."""

        def some(part: Sequence[int]) -> dict[int, bool | OSError]:
            done: dict[int, bool | OSError] = {}
            for item in part:
                try:
                    done[item] = work(item)
                except OSError as error:
                    done[item] = error
            return done

        loop = asyncio.get_running_loop()
        count = _READERS if threads is self._readers else _WRITERS
        parts = [items[first::count] for first in range(count) if first < len(items)]
        outcome: dict[int, bool | OSError] = {}
        for done in await asyncio.gather(*(loop.run_in_executor(threads, some, part) for part in parts)):
            outcome.update(done)
        for result in outcome.values():
            if isinstance(result, OSError):
                self._fault(result)
            else:
                self.breaker.succeeded()
        return outcome

    def _fault(self, error: OSError) -> None:
        was_open = self.breaker.is_open
        self.counts.faults += 1
        self.breaker.failed()
        if self.breaker.is_open and not was_open:
            log.warning("disk tier left alone for a while", path=str(self._file.path), error=error.strerror)
