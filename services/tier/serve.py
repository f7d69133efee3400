"""The process of the KV service."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial

import structlog
import zmq

from engine.engine import StepOutput
from engine.hashing import test_vector
from engine.kv_cache import KVCacheSpec
from engine.memory import describe_cache
from engine.request import HOST, BlockStored, KvEvent
from kv_transfer.connectors.base import ConnectorError, PoolDescription
from kv_transfer.connectors.lent_memory import Lent
from kv_transfer.connectors.shared_memory import SharedSegment, reap_stale_segments
from kv_transfer.tiers.announced import Announced
from kv_transfer.tiers.lacking import RANKS
from kv_transfer.tiers.pins import Pins
from kv_transfer.tiers.policies import evicting, policy_of
from kv_transfer.tiers.store import Store
from services.cluster_state import ClusterState
from services.config import KvConfig, parse_bytes
from services.process import new_incarnation, stop_signal
from services.rpc import cluster_pb2, tiers_pb2_grpc, trace_pb2_grpc, transfer_pb2_grpc, worker_pb2_grpc
from services.rpc_server import RpcServer
from services.security import key_of
from services.tier.ahead import Ahead
from services.tier.below import Below
from services.tier.blocks import KeptBlocks, num_kept
from services.tier.keeper import COPY_SECONDS, Keeper
from services.tier.known_sums import KnownSums
from services.tier.metrics import TierMetrics
from services.tier.pinning import Pinning
from services.tier.sending import TierSender
from services.tier.stores import open_stores
from services.tier.upkeep import Upkeep
from services.worker.cache_service import CacheService
from services.worker.connectors import codecs_of, offered, open_sender
from services.worker.engine_thread import HANG_SECONDS, EngineThread
from services.worker.event_publisher import EventPublisher
from services.worker.prefix_costs import PrefixCosts
from services.worker.receiving import KvReceiver
from services.worker.timelines import Timelines
from services.worker.token_publisher import TokenPublisher
from services.zmq_sockets import secure

log = structlog.get_logger()

_TICK_SECONDS = 0.05
_BEAT_TICKS = 10
_USELESS_SECONDS = 10.0  # without a worker of the model while there are others, before the process ends


async def serve(config: KvConfig) -> None:
    """Runs until SIGTERM, then drains."""
    stop = stop_signal()
    state = ClusterState(config.state, config.cluster)
    await state.connect()
    try:
        card = await _first_card(state, config.model_name, stop)
        if card is not None:
            stores = await open_stores(config, card)
            await KvService(config, state, card, stores).run(stop)
    finally:
        await state.close()


async def _first_card(state: ClusterState, model: str, stop: asyncio.Event) -> cluster_pb2.ModelCard | None:
    """What the first worker says of its model: it decides what is kept. None: the process is to end.

    `model`: name of the only one whose workers count; "": any.
    """
    log.info("waiting for a worker: its blocks decide what is kept")
    found: asyncio.Future[cluster_pb2.ModelCard] = asyncio.get_running_loop().create_future()

    def look(change: str, member: cluster_pb2.Member) -> None:
        usable = member.role in RANKS and member.sends and member.model.hash_vector == test_vector()
        usable = usable and model in ("", member.model.name)
        if change != "left" and usable and not found.done():
            found.set_result(member.model)

    state.on_change(look)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((found, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return found.result() if found.done() else None


class _Patience(PrefixCosts):
    """Nothing is computed here instead of being fetched."""

    def computing_seconds(self, tokens: int) -> float:
        """What a copy may take."""
        return COPY_SECONDS


class KvService:
    """Everything that the process holds, wired together. `card`: of the model whose blocks are kept."""

    def __init__(
        self, config: KvConfig, state: ClusterState, card: cluster_pb2.ModelCard, stores: Sequence[Store]
    ) -> None:
        self._config = config
        self._state = state
        self._key = key_of(config)
        self._incarnation = new_incarnation()
        self._metrics = TierMetrics()
        for name in reap_stale_segments():
            log.info("removed shared memory of a dead worker", segment=name)
        self._segment = self._allocate(KVCacheSpec.parse(card.layout))
        memory = parse_bytes(config.kv_memory_host)
        self._blocks = KeptBlocks(
            card.fingerprint,
            card.layout,
            memory,
            self._segment,
            self._metrics,
            policy_of(evicting(config.kv_policy), config.kv_tenant_share),
        )
        spec, num_blocks = self._blocks.kv_cache.spec, self._blocks.kv_cache.num_blocks
        self._rpc = RpcServer(config.bind, config.rpc_port, self._key, self._metrics.registry)
        self._events = EventPublisher(self._incarnation, config.bind, self._key)
        self._tokens = TokenPublisher(self._incarnation, self._key)
        self._thread = EngineThread(self._blocks, self._on_step, self._on_crash)
        timelines = Timelines(config.name, self._incarnation)
        pool = PoolDescription(
            self._incarnation, self._blocks.pages.num_blocks, spec.block_bytes, spec.layer_bytes, spec.layout
        )
        stream_key = self._key.kv_streams if self._key else b""
        self._connectors = offered(config, self._blocks, pool, self._segment, stream_key, self._secure)
        self._receiver = KvReceiver(
            self._incarnation,
            config.name,
            card.fingerprint,
            card.layout,
            self._thread,
            self._connectors,
            self._key,
            self._metrics,
            timelines,
            _Patience(),
        )
        sums = KnownSums(self._blocks.generation)
        self._receiver.on_verified = sums.landed
        pages = self._blocks.pages.tensor
        lent = None if self._segment is None else Lent(pages, self._segment.describe(pool))
        self._sender = TierSender(
            self._incarnation,
            card.fingerprint,
            card.layout,
            self._thread,
            partial(open_sender, pages.device, stream_key, self._secure, codecs_of(config), lent),
            self._tokens,
            None,
            self._metrics,
            timelines,
            self._receiver,
        )
        self._sender.sums = sums
        self._keeper = Keeper(self._thread, self._receiver, self._key, config.model_name, self._metrics)
        self._announced = Announced((HOST, *(store.name for store in stores)))
        self._below: Below | None = None
        self._ahead: Ahead | None = None
        if stores:
            self._sender.below = self._below = Below(self._thread, stores, self._changed)
            self._ahead = Ahead(self._thread, self._below, self._metrics)
            self._blocks.on_used = partial(self._used, asyncio.get_running_loop(), self._below, self._ahead)
        for store in stores:
            self._keeper.changed_here(self._announced.changed(store.name, [BlockStored(store.hashes())]))
        most, most_of_tenant = int(config.kv_pin_share * num_blocks), int(config.kv_pin_tenant_share * num_blocks)
        pins = Pins(most, most_of_tenant, config.kv_pin_seconds)
        self._pinning = Pinning(self._thread, pins, stores, self._metrics)
        upkeep = Upkeep(
            self._thread, self._below, self._keeper, self._pinning, self._ahead, partial(self._changed, HOST)
        )
        tiers_pb2_grpc.add_TiersServicer_to_server(upkeep, self._rpc.server)
        trace_pb2_grpc.add_TraceServicer_to_server(timelines, self._rpc.server)
        transfer_pb2_grpc.add_TransferServicer_to_server(self._sender, self._rpc.server)
        cache = CacheService(self._incarnation, self._events, self._held)
        worker_pb2_grpc.add_WorkerServicer_to_server(cache, self._rpc.server)
        self._member = cluster_pb2.Member(
            name=config.name,
            role="kv",
            incarnation=self._incarnation,
            grpc_address=self._rpc.address,
            events_address=self._events.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            sends=True,
            tiers=self._announced.tiers,
            model=cluster_pb2.ModelCard(
                name=card.name,
                fingerprint=card.fingerprint,
                layout=card.layout,
                block_size=card.block_size,
                num_blocks=num_blocks,
                hash_vector=test_vector(),
            ),
        )
        log.info(describe_cache(num_blocks, spec.block_size, spec.ranks * spec.block_bytes), layout=card.layout)

    async def run(self, stop: asyncio.Event) -> None:
        """Registers, serves until `stop`, drains. Raises what ended it."""
        self._thread.start()
        await self._rpc.start()
        await self._refresh_load()
        await self._state.register(self._member)
        self._state.on_change(self._keeper.on_change)
        await self._rpc.set_healthy(True)
        log.info("ready", role="kv", address=self._rpc.address)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._tick(stop)), loop.create_task(self._keeper.run())]
        if self._below is not None:
            tasks.append(loop.create_task(self._below.run()))
        if self._ahead is not None:
            tasks.append(loop.create_task(self._ahead.run()))
        for task in tasks:
            task.add_done_callback(lambda _: stop.set())
        await stop.wait()
        ended = [task for task in tasks if task.done()]
        for task in tasks[1:]:  # leases go on until what was asked for is sent
            task.cancel()
        await self._drain()
        tasks[0].cancel()
        self._keeper.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._below is not None:
            await self._below.close()
        await self._receiver.close()
        self._tokens.close()
        self._events.close()
        await asyncio.to_thread(self._thread.stop)
        await self._rpc.stop()
        for connector in self._connectors:
            connector.close()
        if self._segment is not None:
            self._segment.unlink()
        for task in ended:
            task.result()

    def _allocate(self, spec: KVCacheSpec) -> SharedSegment | None:
        """Memory that workers of this machine reach; None: there is none, they send over sockets."""
        pages = spec.ranks * num_kept(spec, parse_bytes(self._config.kv_memory_host))
        try:
            return SharedSegment(pages * spec.block_bytes, pages, stays=True)
        except ConnectorError as error:
            if self._config.connector == "shared_memory" or spec.ranks > 1:
                raise
            log.warning("no shared memory for what is kept, TCP is used", reason=str(error))
            return None

    def _secure(self, socket: zmq.Socket[bytes], server: bool) -> None:
        secure(socket, self._key, server=server)

    def _on_step(self, output: StepOutput) -> None:
        """Event loop, when blocks have come or gone."""
        if output.events:
            self._changed(HOST, output.events)
            if self._below is not None:
                self._below.changed_above(output.events, self._announced)

    def _changed(self, tier: str, events: Sequence[KvEvent]) -> None:
        """A tier has other blocks than before."""
        if tier == HOST:
            self._metrics.changed(events)
        if told := self._announced.changed(tier, events):
            self._keeper.changed_here(told)
            self._events.publish(told)

    def _used(self, loop: asyncio.AbstractEventLoop, below: Below, ahead: Ahead, hashes: list[bytes]) -> None:
        """Engine thread: a worker got these."""
        loop.call_soon_threadsafe(below.used, hashes, self._announced)
        loop.call_soon_threadsafe(ahead.used, hashes)

    async def _held(self) -> Mapping[str, Sequence[bytes]]:
        return self._announced.nearest()

    def _on_crash(self, error: BaseException) -> None:
        """The thread that has the blocks has failed: a new process starts clean."""
        log.critical("the KV service failed", error=repr(error), exc_info=error)
        os._exit(1)

    async def _tick(self, stop: asyncio.Event) -> None:
        ticks, useful_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._receiver.tick(now)
            self._sender.tick(now)
            ticks += 1
            if ticks % _BEAT_TICKS == 0:
                self._events.beat()
                await self._rpc.set_healthy(now - self._thread.last_progress < HANG_SECONDS and not stop.is_set())
                await self._pinning.expire()
                await self._refresh_load()
                useful_at = now if self._keeper.is_of_use else useful_at
                if now - useful_at > _USELESS_SECONDS:
                    log.warning("no worker has the layout that is kept, but others are there: starting anew")
                    return

    async def _refresh_load(self) -> None:
        """Puts what is kept into metrics and into the next heartbeat."""
        blocks = self._blocks
        quarantined = self._receiver.quarantined_blocks
        stats, orphaned, links = await self._thread.call(
            lambda: (blocks.stats(), blocks.orphaned_blocks(quarantined), self._metrics.latest_links())
        )
        kept = len(self._announced.held(HOST))
        self._member.load.free_blocks = blocks.kv_cache.num_blocks - kept
        self._metrics.tell(self._member.load, links)
        self._metrics.set_load(stats, orphaned)
        spec, capacity = blocks.kv_cache.spec, blocks.kv_cache.num_blocks
        block_bytes = spec.ranks * spec.block_bytes
        self._metrics.holds(HOST, kept, kept * block_bytes, capacity * block_bytes)
        self._metrics.tier_waiting.set(self._keeper.num_waiting)
        for store in self._below.stores if self._below is not None else ():
            self._metrics.counted(store.name, store.counts)
            kept = len(self._announced.held(store.name))
            self._metrics.holds(store.name, kept, store.used_bytes, store.capacity_bytes)

    async def _drain(self) -> None:
        """Nobody asks for more, and whoever has asked gets it."""
        self._member.draining = True
        self._sender.draining = True
        await self._rpc.set_healthy(False)
        await self._state.announce()
        deadline = time.monotonic() + self._config.drain_seconds
        while self._sender.num_transfers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        log.info("drained", transfers=self._sender.num_transfers)
