"""The router process: keeps a view of the workers and their caches, and places requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from typing import Any

import grpc
import grpc.aio
import msgspec
import structlog
import zmq
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.request import KvEventBatch
from router.feed import Feed, Verdict
from router.index import BlockIndex
from router.placer import Placed, Placer
from router.policies import session_key
from router.policy import NoWorker, Way
from router.snapshot import Ask
from services.cluster_state import ClusterState
from services.config import RouterConfig
from services.explanations import Explanations
from services.process import new_incarnation, stop_signal
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import RpcServer, make_channel
from services.security import ClusterKey, cluster_key
from services.zmq_sockets import sub_socket

log = structlog.get_logger()

_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_WORKER_ROLES = ("prefill", "decode", "aggregated")
_SESSION_BLOCKS = 4  # which keep prompts together that name no session
_GRACE_SECONDS = 30.0  # a reservation outlives its request's deadline by so much
_MAX_LEASE_SECONDS = 3600.0  # of a reservation whose request has no deadline
_RETRY_SECONDS = 0.5  # between two snapshots that a worker does not give
_SNAPSHOT_SECONDS = 5.0
_SAY_AGAIN_SECONDS = 60.0


class RouterMetrics:
    """What the router exports."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.decision_seconds = Histogram(
            "tandem_router_decision_seconds",
            "Time to place one request",
            registry=registry,
            buckets=(0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01),
        )
        self.overlap = Counter(
            "tandem_router_overlap_blocks",
            "Cached prompt blocks, as predicted and as found",
            ["kind"],
            registry=registry,
        )
        self.placements = Counter("tandem_router_placements", "Placements by reason", ["reason"], registry=registry)
        for way in Way:
            self.placements.labels(way.value)
        for kind in ("predicted", "actual"):
            self.overlap.labels(kind)
        self.fetches = Counter(
            "tandem_router_fetches", "Placements with a prefix to be fetched from another worker", registry=registry
        )
        self.resyncs = Counter("tandem_router_resyncs", "Snapshots taken of workers' caches", registry=registry)
        self.workers = Gauge("tandem_router_workers", "Workers known, by role", ["role"], registry=registry)
        self.blocks = Gauge("tandem_router_index_blocks", "Distinct KV blocks in the index", registry=registry)
        self.reservations = Gauge("tandem_router_reservations", "Requests under way", registry=registry)
        self.full = Gauge(
            "tandem_router_workers_full", "Decode workers where requests wait for KV blocks", registry=registry
        )


class CacheWatcher:
    """Keeps the index true for one worker: snapshot on join and on gaps, events in between."""

    def __init__(
        self, member: cluster_pb2.Member, row: int, index: BlockIndex, key: ClusterKey | None, metrics: RouterMetrics
    ) -> None:
        self._member = member
        self._row = row
        self._index = index
        self._metrics = metrics
        self._feed = Feed()
        self._socket = sub_socket(member.events_address, b"kv", key)  # raises for a malformed address
        self._channel = make_channel(member.grpc_address, key)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Ends the watch; the caller clears the index."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                try:
                    if self._feed.sequence is None:
                        await self._resync()
                    await self._follow()
                except (grpc.aio.AioRpcError, zmq.ZMQError) as error:
                    log.debug("no snapshot of a worker's cache", worker=self._member.name, error=str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._socket.close(linger=0)
            await self._channel.close()

    async def _follow(self) -> None:
        """Applies events up to the next gap."""
        verdict = Verdict.IGNORE
        while verdict is not Verdict.RESYNC:
            frames = await self._socket.recv_multipart()
            try:
                batch = _decoder.decode(frames[1])
            except (msgspec.MsgspecError, IndexError):
                log.warning("malformed KV events dropped", worker=self._member.name)
                continue
            if batch.incarnation != self._member.incarnation:
                continue
            verdict = self._feed.judge(batch.sequence)
            if verdict is Verdict.APPLY:
                self._index.apply(self._row, batch.events)

    async def _resync(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        snapshot = await stub.CacheSnapshot(worker_pb2.CacheSnapshotRequest(), timeout=_SNAPSHOT_SECONDS)
        if snapshot.incarnation == self._member.incarnation:
            self._index.replace(self._row, snapshot.block_hashes)
            self._feed.snapshot(snapshot.sequence)
            self._metrics.resyncs.inc()


class RouterService(router_pb2_grpc.RouterServicer):
    """Places requests on the workers of the cluster state."""

    def __init__(self, config: RouterConfig, key: ClusterKey | None) -> None:
        self.metrics = RouterMetrics()
        self._key = key
        self._placer = Placer(
            policy=config.policy,
            local_prefill_tokens=config.local_prefill_tokens,
            fetch_tokens=config.fetch_tokens,
            overlap_weight=config.overlap_weight,
            overlap_temperature=config.overlap_temperature,
        )
        self._members: dict[int, cluster_pb2.Member] = {}  # workers, by their rows in the placer's table
        self._watchers: dict[int, CacheWatcher] = {}
        self._explanations = Explanations(config.policy)
        self._say_alone_at = 0.0

    def on_change(self, change: str, member: cluster_pb2.Member) -> None:
        """Follows the membership of workers."""
        if member.role not in _WORKER_ROLES or not member.model.block_size:
            return
        if change == "left":
            self._leave(member.incarnation)
        else:
            row = self._placer.fleet.join(member.incarnation)
            if row not in self._members:
                self._watch(row, member)
            self._members[row] = member
            self._describe(row, member)
        members = self._members.values()
        self.metrics.full.set(sum(m.load.waiting_for_blocks > 0 for m in members))
        for role in _WORKER_ROLES:
            self.metrics.workers.labels(role).set(sum(m.role == role for m in members))

    def _leave(self, incarnation: str) -> None:
        row = self._placer.fleet.row(incarnation)
        if row is not None:
            del self._members[row]
            if watcher := self._watchers.pop(row, None):
                watcher.stop()
            self._placer.leave(incarnation)

    def _watch(self, row: int, member: cluster_pb2.Member) -> None:
        try:
            self._watchers[row] = CacheWatcher(member, row, self._placer.index, self._key, self.metrics)
        except zmq.ZMQError as error:  # it is placed by its load and by what is expected of it
            log.warning("a worker's KV events cannot be followed", worker=member.name, error=str(error))

    def _describe(self, row: int, member: cluster_pb2.Member) -> None:
        fleet, load = self._placer.fleet, member.load
        fleet.set(
            row,
            ready=not member.draining and not member.asleep,
            prefills=member.role == "prefill",
            decodes=member.role != "prefill",
            aggregated=member.role == "aggregated",
            fetches=member.fetches,
            sends=member.sends,
            layout=fleet.layout(member.model.layout),
            block_size=member.model.block_size,
            waiting_for_blocks=load.waiting_for_blocks,
            prefill_rate=_measured(load, "prefill_tokens_per_second"),
            fetch_rate=_measured(load, "fetch_tokens_per_second"),
        )

    async def Place(
        self, request: router_pb2.PlaceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.Placement:
        """Chooses workers and books their load."""
        started = time.perf_counter()
        chains = [(chain.layout, list(chain.block_hashes)) for chain in request.chains]
        beginning = b"".join(chains[0][1][:_SESSION_BLOCKS]) if chains else b""
        session = session_key(f"{request.tenant}:{request.session}".encode() if request.session else beginning)
        try:
            placed = self._placer.place(
                (request.request_id, request.attempt),
                Ask(request.prompt_tokens, request.max_tokens, request.local_prefill_only, session),
                chains,
                request.exclude_incarnations,
                now=time.monotonic(),
                lease=min(max(1.0, request.deadline_seconds), _MAX_LEASE_SECONDS) + _GRACE_SECONDS,
            )
        except NoWorker as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (("retry-after", "1"),))
        way = placed.decision.way
        self.metrics.placements.labels(way.value).inc()
        self.metrics.fetches.inc(placed.source is not None)
        if way is Way.ALONE:
            self._say_alone(time.monotonic())
        placement = self._placement(placed)
        self._explanations.add(request, placed, placement.reason, lambda row: self._members[row].name)
        self.metrics.decision_seconds.observe(time.perf_counter() - started)
        return placement

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ExplainReply:
        """What is remembered of a request's placements."""
        return self._explanations.of(request.request)

    async def Release(
        self, request: router_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ReleaseReply:
        """Ends the booking of an attempt."""
        reservation = self._placer.reservations.release(request.request_id, request.attempt)
        if reservation is not None:
            size = self._members[reservation.decode].model.block_size
            self.metrics.overlap.labels("predicted").inc(reservation.predicted_tokens / size)
            self.metrics.overlap.labels("actual").inc(request.cached_tokens / size)
        return router_pb2.ReleaseReply()

    def tick(self, now: float) -> None:
        """Once a second: leases and gauges."""
        self._placer.tick(now)
        self.metrics.blocks.set(len(self._placer.index))
        self.metrics.reservations.set(len(self._placer.reservations))

    def _say_alone(self, now: float) -> None:
        """A cluster in which decode workers compute the prompts answers all the same, so that nobody might notice."""
        if now >= self._say_alone_at:
            self._say_alone_at = now + _SAY_AGAIN_SECONDS
            log.warning("decode workers compute prompts themselves: no prefill worker is ready")

    def _placement(self, placed: Placed) -> router_pb2.Placement:
        decision, snapshot = placed.decision, placed.snapshot
        placement = router_pb2.Placement(
            decode=self._endpoint(decision.decode),
            decode_cached_blocks=snapshot.cached_blocks[decision.decode],
            reason=decision.reason,
        )
        if decision.prefill is not None:
            placement.prefill.CopyFrom(self._endpoint(decision.prefill))
            placement.prefill_cached_blocks = snapshot.cached_blocks[decision.prefill]
        if placed.source is not None:
            tokens = snapshot.cached_tokens[placed.source]
            placement.source.worker.CopyFrom(self._endpoint(placed.source))
            placement.source.tokens = tokens
            placement.reason += f"; {tokens} tokens to be fetched from {placement.source.worker.name}"
        return placement

    def _endpoint(self, row: int) -> router_pb2.Endpoint:
        member = self._members[row]
        return router_pb2.Endpoint(name=member.name, incarnation=member.incarnation, address=member.grpc_address)


def _measured(load: cluster_pb2.Load, name: str) -> float:
    """NaN: not measured."""
    return float(getattr(load, name)) if load.HasField(name) else math.nan


async def serve(config: RouterConfig) -> None:
    """Runs until SIGTERM."""
    stop = stop_signal()
    key = cluster_key(config.cluster_key)
    service = RouterService(config, key)
    rpc = RpcServer(config.bind, 0, key, service.metrics.registry)
    router_pb2_grpc.add_RouterServicer_to_server(service, rpc.server)
    state = ClusterState(config.state, config.cluster)
    await state.connect()
    state.on_change(service.on_change)
    await rpc.start()
    await state.register(
        cluster_pb2.Member(
            name=config.name or "router",
            role="router",
            incarnation=new_incarnation(),
            grpc_address=rpc.address,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
    )
    await rpc.set_healthy(True)
    log.info("ready", role="router", address=rpc.address, policy=config.policy)
    while not stop.is_set():
        service.tick(time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    await state.close()
    await rpc.stop()
