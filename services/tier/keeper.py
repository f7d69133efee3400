"""Write-behind: the KV service copies what workers have computed, in small parts and with rests, as they go on.

It follows workers' KV events. A part is a fetch like any other; the worker's engine sends it between two steps. While
that worker is busy the service rests after each part for a multiple of the time that it took. Workers are copied from
apart, so that one that does not answer holds up nobody else's blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import structlog
import zmq

from engine.hashing import test_vector
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from kv_transfer.messages import PrefixSource
from kv_transfer.tiers.lacking import RANKS, Lacking
from services.cache_watcher import CacheWatcher
from services.rpc import cluster_pb2
from services.security import ClusterKey
from services.tier.blocks import KeptBlocks, copy_of
from services.tier.metrics import TierMetrics
from services.worker.engine_thread import EngineThread
from services.worker.receiving import KvReceiver

log = structlog.get_logger()

COPY_SECONDS = 30.0  # that a part may take: a worker's step may be long
_PART_BYTES = 8 << 20  # the worker's next step waits while these are copied
_PART_BLOCKS = 64
_REST = 2.0  # times as long as a part took
_FAILED_SECONDS = 0.5  # of rest after a part that did not come
_POLL_SECONDS = 0.01
_SNAPSHOT_SLICE = 4096  # blocks taken in at once


class Keeper:
    """Copies blocks of workers whose fingerprint and layout are those of `thread`'s engine.

    `model`: name of the only one whose workers are looked at; "": all are.
    """

    def __init__(
        self, thread: EngineThread, receiver: KvReceiver, key: ClusterKey | None, model: str, metrics: TierMetrics
    ) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self._thread = thread
        self._blocks = thread.engine
        self._receiver = receiver
        self._key = key
        self._model = model
        self._metrics = metrics
        self._workers: dict[str, cluster_pb2.Member] = {}  # by incarnation
        self._watchers: dict[str, CacheWatcher] = {}
        self._copying: set[asyncio.Task[None]] = set()  # one for each worker
        self._others: set[str] = set()  # incarnations whose blocks have another layout
        self._unheard: set[str] = set()  # whose events cannot be followed
        self._lacking = Lacking(self._blocks.kv_cache.num_blocks)
        self._news: dict[str, asyncio.Event] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # never well
        self._numbers = itertools.count()
        self._sending: set[str] = set()  # workers of which a part is under way
        self._over: dict[str, asyncio.Future[int]] = {}  # copies under way, by request
        self._loop = asyncio.get_running_loop()
        self._blocks.on_over = self._tell_over

    @property
    def num_waiting(self) -> int:
        """Blocks that are still to be copied."""
        return len(self._lacking)

    @property
    def is_of_use(self) -> bool:
        """Whether there are workers whose blocks are kept, or none at all."""
        return bool(self._workers) or not self._others

    def on_change(self, change: str, member: cluster_pb2.Member) -> None:
        """Follows the membership of workers."""
        incarnation = member.incarnation
        if member.role not in RANKS or not member.model.block_size or not member.sends:
            return
        if self._model not in ("", member.model.name):
            return
        if change == "left" or member.draining or member.asleep:  # who sends nothing joins again later, by a snapshot
            self._others.discard(incarnation)
            self._unheard.discard(incarnation)
            if self._workers.pop(incarnation, None) is not None:
                self._watchers.pop(incarnation).stop()
                self._lacking.leave(incarnation)
                self._news.pop(incarnation).set()  # its task ends once what is under way is over
        elif incarnation in self._workers:
            self._workers[incarnation] = member
            self._lacking.join(incarnation, RANKS[member.role])  # roles change
        elif incarnation not in self._others | self._unheard:
            self._join(member)

    def changed_here(self, events: Sequence[KvEvent]) -> None:
        """What is kept has changed."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._lacking.kept(block_hashes)
                case BlockRemoved(block_hashes):
                    self._lacking.lost(block_hashes)
                case CacheCleared():  # `Announced` names what has gone
                    pass

    async def run(self) -> None:
        """Copies until it is cancelled. Raises what a copy should not."""
        try:
            await self._ended
        finally:
            copying = list(self._copying)
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)

    async def copy_all(self, worker: str, hashes: Sequence[bytes], seconds: float) -> int:
        """Copies what is lacking of these blocks of a worker, for so long at most; how many are kept then."""
        if worker in self._workers:
            self._stored(worker, hashes)
        ends = time.monotonic() + seconds
        while worker in self._sending or self._lacking.waits_for(worker):
            if time.monotonic() > ends:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return self._lacking.num_held(hashes)

    def wanted(self, hashes: Sequence[bytes]) -> None:
        """Somebody cares for these blocks: what is not here of them is copied again from workers that have it."""
        self._lacking.wanted(hashes)
        for news in self._news.values():
            news.set()

    def stop(self) -> None:
        """Ends the watch over the workers."""
        for watcher in self._watchers.values():
            watcher.stop()

    # Inside

    def _join(self, member: cluster_pb2.Member) -> None:
        ours = self._blocks.fingerprint, self._blocks.kv_cache.spec.layout, test_vector()
        card = member.model
        if (card.fingerprint, card.layout, card.hash_vector) != ours:
            self._others.add(member.incarnation)
            log.warning(
                "a worker's blocks are not kept: they have another layout than those that are",
                worker=member.name,
                layout=card.layout,
                kept=ours[1],
            )
            return
        try:
            watcher = CacheWatcher(member, _Worker(self, member.incarnation), self._key)
        except zmq.ZMQError as error:
            self._unheard.add(member.incarnation)
            log.warning("a worker's KV events cannot be followed", worker=member.name, error=str(error))
            return
        self._workers[member.incarnation] = member
        self._watchers[member.incarnation] = watcher
        self._lacking.join(member.incarnation, RANKS[member.role])
        self._news[member.incarnation] = asyncio.Event()
        task = self._loop.create_task(self._copy_from(member.incarnation))
        self._copying.add(task)
        task.add_done_callback(self._over_with)

    async def _copy_from(self, incarnation: str) -> None:
        """Copies what a worker has until it leaves."""
        spec, news = self._blocks.kv_cache.spec, self._news[incarnation]
        part = max(1, min(_PART_BLOCKS, _PART_BYTES // (spec.ranks * spec.block_bytes)))
        while self._news.get(incarnation) is news:  # it may have left, and joined again
            worker = self._workers[incarnation]
            self._metrics.tier_dropped.labels("full").inc(self._lacking.given_up)
            self._lacking.given_up = 0
            found = self._lacking.take(part, incarnation)
            if found is None:
                news.clear()
                await news.wait()
                continue
            hashes = found[1]
            started = time.monotonic()
            self._sending.add(incarnation)
            landed = await self._copy(worker, hashes)
            self._sending.discard(incarnation)
            if landed < len(hashes):
                reason = "refused" if incarnation in self._workers else "gone"
                dropped = self._lacking.failed(incarnation, hashes[landed:])
                self._metrics.tier_dropped.labels(reason).inc(dropped)
            is_busy = worker.load.running + worker.load.waiting > 0
            rest = _REST * (time.monotonic() - started) if is_busy else 0.0
            await asyncio.sleep(rest if landed else max(rest, _FAILED_SECONDS))

    def _over_with(self, task: asyncio.Task[None]) -> None:
        """A worker's task has ended."""
        self._copying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _copy(self, worker: cluster_pb2.Member, hashes: list[bytes]) -> int:
        """How many of the blocks have landed."""
        size = self._blocks.kv_cache.spec.block_size
        request = copy_of(f"copy-{next(self._numbers)}/0", hashes, size)
        source = PrefixSource(worker.name, worker.incarnation, worker.grpc_address, len(hashes) * size)
        over = self._over[request.request_id] = self._loop.create_future()
        try:
            await self._receiver.fetch(request, source)
            async with asyncio.timeout(2 * COPY_SECONDS):
                return await over
        except TimeoutError:  # it has a deadline of its own: this is a fault of ours
            log.error("a copy did not end", worker=worker.name)
            return 0
        finally:
            del self._over[request.request_id]
            # Nobody is told what it took, which the engine thread notes after it has told of the end.
            self._thread.post(partial(self._receiver.notes.forget, request.request_id))

    def _tell_over(self, request_id: str, landed: int) -> None:
        """Engine thread."""
        self._loop.call_soon_threadsafe(self._is_over, request_id, landed)

    def _is_over(self, request_id: str, landed: int) -> None:
        over = self._over.get(request_id)
        if over is not None and not over.done():
            over.set_result(landed)

    def _stored(self, worker: str, hashes: Sequence[bytes]) -> None:
        if worker in self._workers:
            self._lacking.stored(worker, hashes)
            self._news[worker].set()


class _Worker:
    """What one worker has is wanted here."""

    def __init__(self, keeper: Keeper, incarnation: str) -> None:
        self._keeper = keeper
        self._incarnation = incarnation

    def replacing(self, held: Mapping[str, Sequence[bytes]]) -> Iterator[None]:
        hashes = held.get("", ())
        self._keeper._lacking.clear(self._incarnation)
        for start in range(0, len(hashes), _SNAPSHOT_SLICE):
            self._keeper._stored(self._incarnation, hashes[start : start + _SNAPSHOT_SLICE])
            yield

    def told(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._keeper._blocks.lineage.told(event)
                    self._keeper._stored(self._incarnation, block_hashes)
                case BlockRemoved(block_hashes):
                    self._keeper._lacking.removed(self._incarnation, block_hashes)
                case CacheCleared():
                    self._keeper._lacking.clear(self._incarnation)

    def asked(self, *, snapshot: bool) -> None:
        """Nothing is counted here."""
