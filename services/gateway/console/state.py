"""Puts the state of the cluster together: members and their heartbeats, routers' answers, this gateway's requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import grpc.aio

from services.cluster_state import ClusterState
from services.gateway.console.history import WORKER_ROLES, Counts, History, Sample, hit_rate, rate
from services.gateway.console.recent import (
    Objectives,
    Recent,
    attainment,
    buckets,
    outcomes,
    per_second,
    quantiles,
    tpots,
    ttfts,
)
from services.gateway.metrics import Ended, GatewayMetrics
from services.gateway.placement import Placements
from services.gateway.waterfall import Waterfalls
from services.live import (
    BUCKET_SECONDS,
    GatewayView,
    LinkView,
    Live,
    ModelView,
    RouterView,
    Series,
    Traffic,
    WorkerView,
)
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

_ANSWER_SECONDS = 1.0
_LATEST = 24  # requests that are told one by one
_FRESH_SECONDS = 0.5  # all that look share what one has asked for


class LiveState:
    """The cluster as one gateway sees it. `incarnation`: the gateway's; `models`: those that it serves."""

    def __init__(
        self,
        cluster: str,
        incarnation: str,
        models: Sequence[str],
        state: ClusterState,
        placements: Placements,
        metrics: GatewayMetrics,
        waterfalls: Waterfalls,
    ) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._models = models
        self._state = state
        self._placements = placements
        self._metrics = metrics
        self._waterfalls = waterfalls
        self._recent = Recent()
        metrics.on_ended = self._recent.add
        self.history = History(state)
        self._asking = asyncio.Lock()
        self._latest: tuple[float, Live] | None = None

    async def live(self) -> Live:
        """As of now, or half a second ago."""
        async with self._asking:
            if self._latest is None or time.monotonic() > self._latest[0] + _FRESH_SECONDS:
                routers = sorted(self._state.members("router"), key=_place)
                statuses = await asyncio.gather(*(self._status(router) for router in routers))
                live = self._put_together(list(zip(routers, statuses, strict=True)))
                self._latest = time.monotonic(), live
            return self._latest[1]

    # Inside

    async def _status(self, router: cluster_pb2.Member) -> router_pb2.StatusReply | None:
        """None: it does not answer."""
        stub = router_pb2_grpc.RouterStub(self._placements.channel(router.grpc_address))
        try:
            return await answer_of(stub.Status(router_pb2.StatusRequest(), timeout=_ANSWER_SECONDS))
        except (grpc.aio.AioRpcError, ChannelClosed):
            return None

    def _put_together(self, routers: list[tuple[cluster_pb2.Member, router_pb2.StatusReply | None]]) -> Live:
        now = self.history.now()
        known = [status for _, status in routers if status is not None]
        left_out = {each.name: each.reason for status in known for each in status.left_out}
        objectives = Objectives(
            max((status.slo_ttft for status in known), default=0.0) or math.inf,
            max((status.slo_tpot for status in known), default=0.0) or math.inf,
        )
        members = sorted(self._state.members(*WORKER_ROLES), key=_place)
        workers = [self._worker(member, left_out.get(member.name, ""), now) for member in members]
        links = self._links(members, now)
        requests = self._recent.of(now.at)
        return Live(
            at=time.time(),
            cluster=self._cluster,
            models=self._model_views(members),
            connected=self._state.connected,
            workers=workers,
            links=links,
            routers=[_router(member, status) for member, status in routers],
            gateways=[
                GatewayView(name=m.name, incarnation=m.incarnation, here=m.incarnation == self._incarnation)
                for m in sorted(self._state.members("gateway"), key=_place)
            ],
            traffic=self._traffic(requests, objectives, workers, links, now),
            series=self._series(requests, objectives, now),
            requests=self._waterfalls.latest()[:_LATEST],
        )

    def _model_views(self, members: Sequence[cluster_pb2.Member]) -> list[ModelView]:
        others = sorted({member.model.name for member in members} - set(self._models))
        views = []
        for name in self._models:
            state = "asleep" if self._placements.is_asleep(name) else "waiting for workers"
            views.append(ModelView(name=name, state="ready" if self._placements.is_ready(name) else state))
        return views + [ModelView(name=name, state="not served here") for name in others]

    def _worker(self, member: cluster_pb2.Member, reason: str, now: Sample) -> WorkerView:
        before, load = self.history.before(now), member.load
        seconds = now.at - before.at
        after = now.workers[member.incarnation]
        old = before.workers.get(member.incarnation, after)
        pairs = [self._counts(span, member.incarnation) for span in self.history.spans(now)]
        return WorkerView(
            name=member.name,
            role=member.role,
            incarnation=member.incarnation,
            host=member.host,
            model=member.model.name,
            state="draining" if member.draining else "asleep" if member.asleep else "out" if reason else "ready",
            reason=reason,
            running=load.running,
            waiting=load.waiting,
            waiting_for_blocks=load.waiting_for_blocks,
            blocks=member.model.num_blocks,
            free_blocks=load.free_blocks,
            generated_per_second=rate(after.generated, old.generated, seconds),
            computed_per_second=rate(after.computed, old.computed, seconds),
            hit_rate=hit_rate(pair for pair in pairs if pair is not None),
            hits=[None if pair is None else hit_rate([pair]) for pair in pairs],
        )

    @staticmethod
    def _counts(span: tuple[Sample, Sample] | None, incarnation: str) -> tuple[Counts, Counts] | None:
        """What a worker had counted at both ends of a bucket; None: it was not there."""
        if span is None or not all(incarnation in sample.workers for sample in span):
            return None
        return span[0].workers[incarnation], span[1].workers[incarnation]

    def _links(self, members: Sequence[cluster_pb2.Member], now: Sample) -> list[LinkView]:
        names = {member.incarnation: member.name for member in members}
        before = self.history.before(now)
        found = []
        for member in members:
            old = before.workers.get(member.incarnation, now.workers[member.incarnation]).links
            for link in member.load.links:
                # Heartbeats name so many links at most: of one that is new among as many as before, nothing is known.
                was = old.get((link.peer, link.connector), 0 if len(old) < len(member.load.links) else link.bytes)
                view = LinkView(
                    source=link.peer,
                    target=member.incarnation,
                    source_name=names.get(link.peer, ""),
                    target_name=member.name,
                    connector=link.connector,
                    bytes_per_second=rate(link.bytes, was, now.at - before.at),
                    bytes=link.bytes,
                    transfers=link.transfers,
                )
                found.append(view)
        return found

    def _traffic(
        self,
        requests: list[Ended],
        objectives: Objectives,
        workers: list[WorkerView],
        links: list[LinkView],
        now: Sample,
    ) -> Traffic:
        spans = [span for span in self.history.spans(now) if span is not None]
        pairs = [self._counts(span, incarnation) for span in spans for incarnation in span[1].workers]
        return Traffic(
            running=self._metrics.num_running,
            ended=len(requests),
            outcomes=outcomes(requests),
            requests_per_second=per_second(requests, now.at),
            generated_per_second=sum(worker.generated_per_second for worker in workers),
            computed_per_second=sum(worker.computed_per_second for worker in workers),
            kv_bytes_per_second=sum(link.bytes_per_second for link in links),
            hit_rate=hit_rate(pair for pair in pairs if pair is not None),
            ttft=quantiles(ttfts(requests)),
            tpot=quantiles(tpots(requests)),
            slo_ttft=_finite(objectives.ttft),
            slo_tpot=_finite(objectives.tpot),
            attainment=attainment(requests, objectives),
        )

    def _series(self, requests: list[Ended], objectives: Objectives, now: Sample) -> Series:
        parts = buckets(requests, now.at)
        first = [quantiles(ttfts(part)) for part in parts]
        later = [quantiles(tpots(part)) for part in parts]
        return Series(
            bucket_seconds=BUCKET_SECONDS,
            requests=[len(part) for part in parts],
            ttft_p50=[each.p50 for each in first],
            ttft_p95=[each.p95 for each in first],
            tpot_p50=[each.p50 for each in later],
            tpot_p95=[each.p95 for each in later],
            attainment=[attainment(part, objectives) for part in parts],
            generated_per_second=[self._generated(span) for span in self.history.spans(now)],
        )

    def _generated(self, span: tuple[Sample, Sample] | None) -> float | None:
        """Tokens per second of all workers; None: not known, or measured over too short a time."""
        if span is None or span[1].at - span[0].at < 1.0:
            return None
        pairs = [self._counts(span, incarnation) for incarnation in span[1].workers]
        generated = sum(pair[1].generated - pair[0].generated for pair in pairs if pair is not None)
        return rate(generated, 0, span[1].at - span[0].at)


def _router(member: cluster_pb2.Member, status: router_pb2.StatusReply | None) -> RouterView:
    status = status or router_pb2.StatusReply(precision=math.nan, recall=math.nan)
    return RouterView(
        name=member.name,
        incarnation=member.incarnation,
        policy=status.policy,
        mode=status.mode,
        reason=status.reason,
        precision=_finite(status.precision),
        recall=_finite(status.recall),
        queued=status.queued,
        under_way=status.reservations,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _place(member: cluster_pb2.Member) -> tuple[int, str, str]:
    """How members are sorted: prefill workers first, by name."""
    return WORKER_ROLES.index(member.role) if member.role in WORKER_ROLES else -1, member.name, member.incarnation
