"""Placements over gRPC, on the workers of the cluster state."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections import Counter
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from engine.request import TIERS
from router.admission import Refused
from router.cost import Objectives
from router.fit import Measured
from router.placer import Placed, Placer
from router.policies import session_key
from router.policy import NoWorker, Way
from router.reservations import Reservation
from router.shared_load import SharedLoad
from router.snapshot import Ask
from router.tiers import number
from services import tracing
from services.config import RouterConfig
from services.process import new_incarnation
from services.router.explanations import Explanations
from services.router.health_watch import HealthWatch
from services.router.line import Lines, Released
from services.router.load_stream import News
from services.router.metrics import RouterMetrics
from services.router.prefetch import Prefetch
from services.router.reuse_watch import ReuseWatch
from services.router.watchers import Watchers, hashes_alike
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc
from services.security import ClusterKey
from services.tracing import traceparent

log = structlog.get_logger()

_WORKER_ROLES = ("prefill", "decode", "aggregated", "kv")  # the last gets no requests, but has what others may fetch
_SESSION_BLOCKS = 4  # which keep prompts together that name no session
_GRACE_SECONDS = 30.0  # a reservation outlives its request's deadline by so much
_MAX_LEASE_SECONDS = 3600.0  # of a reservation whose request has no deadline
_SAY_AGAIN_SECONDS = 60.0
_TELL_SECONDS = 0.5  # for the other routers to be told; later, a gateway need not wait any more
_WELL = (router_pb2.OK, router_pb2.ABORTED)
_RETIRED_SECONDS = 3600.0  # after its last worker left, a model is none that lacks workers
_NO_LAYOUT = -1  # no prompt has hashes of it
_RATES = 1e-3, 1e9  # tokens per second that a worker may have measured
_SPREAD = 1.25  # of times to come back: so many times as long at most


class RouterService(router_pb2_grpc.RouterServicer):
    """Places requests on the workers of the cluster state."""

    def __init__(self, config: RouterConfig, key: ClusterKey | None) -> None:
        self.metrics = RouterMetrics()
        self._config = config
        self._placer = Placer(
            policy=config.policy,
            local_prefill_tokens=config.local_prefill_tokens,
            fetch_tokens=config.fetch_tokens,
            overlap_weight=config.overlap_weight,
            overlap_temperature=config.overlap_temperature,
            prefix_tolerance=config.prefix_tolerance,
            objectives=Objectives(config.slo_ttft or math.inf, config.slo_tpot or math.inf),
        )
        # Workers and KV services, by their rows in the placer's table.
        self._members: dict[int, cluster_pb2.Member] = {}
        self._models: dict[str, float] = {}  # that workers had, and when the last one was here, monotonic seconds
        self._health = HealthWatch(self._placer.health, self._placer.fleet, self._members, key, self.metrics)
        self._watchers = Watchers(self._placer, key, self.metrics)
        self._reuse = ReuseWatch(config.policy, self._watchers, self.metrics)
        self._lines = Lines(self._placer, config.max_queue, config.slo_ttft or math.inf, self.metrics)
        self._prefetch = Prefetch(self._placer, self._members, config.fetch_tokens, key)
        self._explanations = Explanations(config.policy)
        self._say_alone_at: dict[str, float] = {}  # by model
        self.incarnation = new_incarnation()
        self.shared = SharedLoad(self.incarnation, self._placer)
        self.news = News()  # for other routers
        self.metrics.blocks.set_function(lambda: len(self._placer.index))
        self.metrics.reservations.set_function(lambda: len(self._placer.reservations))
        self.metrics.staleness.set_function(lambda: self.shared.staleness(time.monotonic()))

    def on_change(self, change: str, member: cluster_pb2.Member) -> None:
        """Follows the membership of workers and of other routers."""
        if member.role == "router":
            if change == "left":
                self.shared.leave(member.incarnation)
            else:
                self.shared.join(member.incarnation, time.monotonic())
        if member.role not in _WORKER_ROLES or not member.model.block_size:
            return
        if change == "left":
            self._leave(member.incarnation)
        else:
            tiers = [number(tier) for tier in member.tiers if tier in TIERS] or [0]
            rows = {tier: self._placer.fleet.join(member.incarnation, tier) for tier in tiers}
            row = rows[tiers[0]]
            if row not in self._members:
                self._watchers.join(rows, member)
            elif self._members[row].role != member.role:
                log.info("a worker has another role", worker=member.name, role=member.role)
                self._placer.changed_role(row)
            for each in rows.values():
                self._members[each] = member
                self._describe(each, member)
            self._health.heard(row, member.load)
        self._lines.freed()
        members = self._each()
        self.metrics.full.set(sum(m.load.waiting_for_blocks > 0 for m in members))
        self._models[member.model.name] = time.monotonic()
        counts = Counter((m.role, m.model.name) for m in members)
        for of in itertools.product(_WORKER_ROLES, self._models):
            self.metrics.workers.labels(*of).set(counts[of])

    def _leave(self, incarnation: str) -> None:
        rows = self._placer.fleet.rows(incarnation)
        for row in rows:
            del self._members[row]
        if rows:
            self._placer.leave(incarnation)
            self._watchers.leave(rows[0])

    def _each(self) -> list[cluster_pb2.Member]:
        """The members, each once."""
        return list({member.incarnation: member for member in self._members.values()}.values())

    def _describe(self, row: int, member: cluster_pb2.Member) -> None:
        fleet, load, alike = self._placer.fleet, member.load, hashes_alike(member)
        fleet.set(
            row,
            ready=not member.draining and not member.asleep,
            prefills=member.role == "prefill",
            decodes=member.role in ("decode", "aggregated"),
            aggregated=member.role == "aggregated",
            fetches=member.fetches and alike,
            sends=member.sends and alike,
            model=fleet.model(member.model.name),
            layout=fleet.layout(member.model.layout) if alike else _NO_LAYOUT,
            block_size=member.model.block_size,
            waiting_for_blocks=load.waiting_for_blocks,
            free_tokens=self._free_tokens(row, member),
            prefill_rate=_measured(load, "prefill_tokens_per_second"),
            fetch_rate=[
                _measured(load, "fetch_tokens_per_second"),
                *(_within(load.restore_tokens_per_second.get(tier, math.nan)) for tier in TIERS),
            ],
        )

    def _free_tokens(self, row: int, member: cluster_pb2.Member) -> float:
        """KV that a worker has for new requests. Those that wait in an aggregated worker have theirs yet to come."""
        card, load = member.model, member.load
        if not card.num_blocks:
            return math.inf
        table = self._placer.fleet.table
        mean = table["decode_tokens"][row] / max(1, table["requests"][row])
        owed = load.waiting * mean if member.role == "aggregated" else 0.0
        return float(load.free_blocks * card.block_size - owed)

    async def Place(
        self, request: router_pb2.PlaceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.Placement:
        """Chooses workers and books their load, as soon as there is room."""
        chains = [(chain.layout, list(chain.block_hashes)) for chain in request.chains]
        beginning = b"".join(chains[0][1][:_SESSION_BLOCKS]) if chains else b""
        session = session_key(f"{request.tenant}:{request.session}".encode() if request.session else beginning)
        model = self._placer.fleet.model(request.model) if request.model else None
        ask = Ask(request.prompt_tokens, request.max_tokens, request.local_prefill_only, session, model)
        arrived = time.monotonic()
        span = tracing.start("place", traceparent.get(), request=request.request_id, attempt=request.attempt)
        try:
            async with self._lines.turn(request, ask, partial(self._prefetch.begin, chains)) as held:
                placement = self._place(request, ask, chains, held)
            if held:
                tracing.record("queue", span.context, arrived, arrived + held, waits_for="room")
            span.end(decode=placement.decode.name, prefill=placement.prefill.name, reason=placement.reason)
            return placement
        except NoWorker as error:
            span.end(error=str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (("retry-after", "1"),))
        except Refused as error:
            span.end(error=str(error))
            # Not all shall come back at once.
            seconds = max(1.0, error.retry_after * random.uniform(1.0, _SPREAD))
            told = (("retry-after", f"{seconds:.1f}"), ("shed", error.why.value))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), told)
        except Released:
            await context.abort(grpc.StatusCode.ABORTED, "the request was released while it waited")
        finally:
            span.end(error="given up")  # unless it has ended

    def _place(
        self, request: router_pb2.PlaceRequest, ask: Ask, chains: list[tuple[str, list[bytes]]], held: float
    ) -> router_pb2.Placement:
        started = time.perf_counter()
        placed = self._placer.place(
            (request.request_id, request.attempt),
            ask,
            chains,
            request.exclude_incarnations,
            now=time.monotonic(),
            lease=min(max(1.0, request.deadline_seconds), _MAX_LEASE_SECONDS) + _GRACE_SECONDS,
        )
        self.shared.booked((request.request_id, request.attempt), chains)
        self.news.add()
        way = placed.decision.way
        self.metrics.placements.labels(way.value).inc()
        self.metrics.fetches.inc(placed.source is not None)
        if way is Way.ALONE:
            self._say_alone(request.model, time.monotonic())
        placement = self._placement(placed)
        placement.held_seconds = held
        left_out = self._health.left_out(request, placed)
        self._explanations.add(request, placed, placement.reason, held, left_out, lambda row: self._members[row].name)
        self.metrics.decision_seconds.observe(time.perf_counter() - started)
        return placement

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ExplainReply:
        """What is remembered of a request's placements."""
        return self._explanations.of(request.request)

    async def Shed(
        self, request: router_pb2.ShedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ShedReply:
        """For some seconds a part of a model's requests is refused."""
        if not (0 <= request.share <= 1 and 0 < request.seconds <= _MAX_LEASE_SECONDS):
            told = f"share 0 to 1, and seconds above 0 and up to {_MAX_LEASE_SECONDS:.0f}, are wanted"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)
        if request.model not in self._models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker of {request.model} was ever seen here")
        number = self._placer.fleet.model(request.model)
        if (share := round(request.share, 2)) != round(self._lines.shed_share(number), 2):
            log.info("sheds", model=request.model, share=share)
        self._lines.shed(number, request.share, request.seconds)
        self.metrics.shed_share.labels(request.model).set(self._lines.shed_share(number))
        return router_pb2.ShedReply()

    async def Status(
        self, request: router_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.StatusReply:
        """What is known, and whether that holds."""
        now = time.monotonic()
        status = self._reuse.status(now)
        status.blocks, status.reservations = len(self._placer.index), len(self._placer.reservations)
        status.routers, status.staleness_seconds = len(self.shared), self.shared.staleness(now)
        status.left_out.extend(self._health.out(now))
        status.queued = len(self._lines)
        status.slo_ttft, status.slo_tpot = self._config.slo_ttft, self._config.slo_tpot
        status.models.extend(self._served())
        return status

    def _served(self) -> list[router_pb2.ServedModel]:
        """Models by name, also those whose workers are all gone."""
        found = {name: router_pb2.ServedModel(name=name) for name in sorted(self._models)}
        for member in self._each():
            found[member.model.name].workers[member.role] += 1
        for name, model in found.items():
            number = self._placer.fleet.model(name)
            model.queued, model.shed = self._lines.waiting_for(number), self._lines.shed_share(number)
        return list(found.values())

    async def Release(
        self, request: router_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ReleaseReply:
        """Ends the booking of an attempt, and learns from how it ended. Answers when the others can know it."""
        reservation = self._placer.reservations.release(request.request_id, request.attempt)
        self.shared.released((request.request_id, request.attempt), request.SerializeToString())
        told = self.news.add()
        self._lines.release(request.request_id, request.attempt)
        self._ended(request, reservation, told_here=True)
        if self.shared.news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), _TELL_SECONDS)
        return router_pb2.ReleaseReply()

    def hear(self, message: bytes) -> None:
        """Takes in what another router told. Raises msgspec.MsgspecError, or DecodeError for what a gateway told it."""
        for reservation, report in self.shared.take_in(message, time.monotonic()):
            self._ended(router_pb2.ReleaseRequest.FromString(report), reservation, told_here=False)

    def tick(self, now: float, *, connected: bool = True) -> None:
        """Once a second: leases, health, the self-check. `connected`: whether workers' heartbeats come through."""
        self._placer.tick(now)
        self._health.tick(now, connected=connected)
        self.shared.tick(now)
        self._watchers.tick(now)
        self._reuse.tick(now)
        self._models |= dict.fromkeys((member.model.name for member in self._members.values()), now)
        for name, seen in list(self._models.items()):
            # What was asked for may be over.
            self.metrics.shed_share.labels(name).set(self._lines.shed_share(self._placer.fleet.model(name)))
            if now - seen > _RETIRED_SECONDS:
                del self._models[name]
                self.metrics.forget(name, _WORKER_ROLES)

    def _ended(self, request: router_pb2.ReleaseRequest, booked: Reservation | None, *, told_here: bool) -> None:
        """An attempt has ended. All routers learn from it; that which its gateway told counts it."""
        late = None
        if booked is not None and request.outcome in _WELL and not request.prefill_failed:
            late = self._learn(request, booked, told_here=told_here)
        self._health.ended(request, late, counts=told_here)
        self._lines.freed()
        if booked is None or not request.HasField("cached_tokens"):
            return
        predicted, found = booked.predicted_tokens, request.cached_tokens
        self._reuse.ended(predicted, found, time.monotonic())
        if told_here:
            self._reuse.count(predicted, found, self._members[booked.decode].model.block_size)
            self._explanations.ended(request, predicted)

    def _learn(self, request: router_pb2.ReleaseRequest, booked: Reservation, *, told_here: bool) -> float | None:
        """Compares predictions with what came of them; actual through predicted seconds to the first token."""
        ttft = request.ttft_seconds if request.HasField("ttft_seconds") else None
        measured = Measured(ttft, request.output_tokens, request.decode_seconds)
        self._placer.learn(booked, measured)
        ratios = measured.against(booked.prediction)
        if told_here:
            for name, ratio in ratios.items():
                self.metrics.prediction_ratio.labels(name).observe(ratio)
        return ratios.get("ttft")

    def _say_alone(self, model: str, now: float) -> None:
        """A cluster in which decode workers compute the prompts answers all the same, so that nobody might notice."""
        if now >= self._say_alone_at.get(model, 0.0):
            self._say_alone_at[model] = now + _SAY_AGAIN_SECONDS
            log.warning("decode workers compute prompts themselves: no prefill worker is ready", model=model)

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
            tier = int(snapshot.table["tier"][placed.source])
            placement.source.tier = TIERS[tier - 1] if tier else ""
            of = f"{placement.source.worker.name} ({placement.source.tier})" if tier else placement.source.worker.name
            placement.reason += f"; {tokens} tokens to be fetched from {of}"
        return placement

    def _endpoint(self, row: int) -> router_pb2.Endpoint:
        member = self._members[row]
        return router_pb2.Endpoint(name=member.name, incarnation=member.incarnation, address=member.grpc_address)


def _measured(load: cluster_pb2.Load, name: str) -> float:
    """NaN: not measured, or no rate at all, which must not reach the costs of all workers."""
    return _within(float(getattr(load, name)) if load.HasField(name) else math.nan)


def _within(rate: float) -> float:
    """NaN: it cannot be."""
    return rate if rate == 0 or _RATES[0] <= rate <= _RATES[1] else math.nan
