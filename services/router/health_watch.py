"""What the router hears of its workers' health, and what it tells of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

import grpc.aio
import numpy as np
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.fleet import Fleet
from router.health import Health, Outcome, Report
from router.placer import Placed
from services.router.metrics import RouterMetrics
from services.rpc import cluster_pb2, router_pb2
from services.rpc_server import make_channel
from services.security import ClusterKey

log = structlog.get_logger()

_CHECK_SECONDS = 1.0
_TOLD = 16  # workers that an explanation names as left out
_OUTCOMES = {
    router_pb2.UNTOLD: Outcome.UNTOLD,
    router_pb2.OK: Outcome.OK,
    router_pb2.CLIENT_ERROR: Outcome.CLIENT_ERROR,
    router_pb2.WORKER_ERROR: Outcome.WORKER_ERROR,
    router_pb2.LOST: Outcome.LOST,
    router_pb2.TIMED_OUT: Outcome.TIMED_OUT,
    router_pb2.ABORTED: Outcome.ABORTED,
}


class HealthWatch:
    """Feeds `health` and asks workers that may come back but get no requests. `members`: by their rows in the table."""

    def __init__(
        self,
        health: Health,
        fleet: Fleet,
        members: Mapping[int, cluster_pb2.Member],
        key: ClusterKey | None,
        metrics: RouterMetrics,
    ) -> None:
        self._health = health
        self._fleet = fleet
        self._members = members
        self._key = key
        self._metrics = metrics
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._shut: set[str] = set()  # incarnations, as told last

    def heard(self, row: int, load: cluster_pb2.Load) -> None:
        """A worker's heartbeat."""
        self._health.heard(row, running=load.running, steps=load.steps, now=time.monotonic())

    def ended(self, report: router_pb2.ReleaseRequest, late: float | None, *, counts: bool) -> None:
        """An attempt has ended. `counts`: in the metrics, of one router only."""
        outcome = _OUTCOMES.get(report.outcome, Outcome.UNTOLD)
        if counts:
            self._metrics.outcomes.labels(outcome.value).inc()
            self._metrics.transfer_faults.inc(report.prefill_failed)
        self._health.ended(
            Report(
                key=(report.request_id, report.attempt),
                decode=self._fleet.row(report.decode),
                prefill=self._fleet.row(report.prefill),
                outcome=outcome,
                prefill_failed=report.prefill_failed,
                answered=report.output_tokens > 0,
                late=late,
            ),
            time.monotonic(),
        )

    def tick(self, now: float, *, connected: bool) -> None:
        """Once a second. `connected`: whether heartbeats come through."""
        health, metrics = self._health, self._metrics
        if not connected:
            health.unheard()
        for row, reason in health.judge(now):
            log.warning("a worker is far worse than its peers and is ejected", worker=self._name(row), reason=reason)
            metrics.ejections.labels(reason).inc()
        for row in health.waiting(now):
            if row not in self._checks:
                self._checks[row] = task = asyncio.get_running_loop().create_task(self._check(row))
                task.add_done_callback(lambda _, row=row: self._checks.pop(row))  # type: ignore[misc]
        counts = health.count(now)
        for kind in ("worker", "pair"):
            for state in ("open", "half open"):
                metrics.breakers.labels(kind, state.replace(" ", "_")).set(counts[kind, state])
        metrics.ejected.set(health.num_ejected(now))
        metrics.stalled.set(health.num_stalled(now))
        self._tell(now)

    def left_out(self, request: router_pb2.PlaceRequest, placed: Placed) -> list[router_pb2.LeftOut]:
        """Workers of its model that could not be taken for a request, and why."""
        now = time.monotonic()
        peers = (each for each in self._out(now) if request.model in ("", self._members[each[0]].model.name))
        found = dict(itertools.islice(peers, _TOLD))
        for incarnation in request.exclude_incarnations:
            if (row := self._fleet.row(incarnation)) is not None:
                found[row] = "failed this request before"
        decode = placed.decision.decode
        for row in self._health.apart.get(decode, ()):
            found.setdefault(row, self._health.reason_apart(row, decode, now))
        found.pop(decode, None)  # where all fail, one of them is taken all the same
        return self._named(found.items())

    def out(self, now: float) -> list[router_pb2.LeftOut]:
        """All workers that get nothing now, and why."""
        return self._named(self._out(now))

    # Inside

    def _out(self, now: float) -> Iterator[tuple[int, str]]:
        table = self._fleet.table
        out = (table["shut"] | ~table["ready"]) & (table["prefills"] | table["decodes"])
        return ((int(row), self._why(int(row), now)) for row in np.flatnonzero(out))

    def _named(self, found: Iterable[tuple[int, str]]) -> list[router_pb2.LeftOut]:
        return [router_pb2.LeftOut(name=self._name(row), reason=reason) for row, reason in found]

    def _why(self, row: int, now: float) -> str:
        member = self._members[row]
        if member.draining or member.asleep:
            return "draining" if member.draining else "asleep"
        return self._health.reason(row, now)

    def _name(self, row: int) -> str:
        return self._members[row].name

    def _tell(self, now: float) -> None:
        """Logs who is shut out newly, and who is not any more."""
        shut = {self._members[row].incarnation: row for row in np.flatnonzero(self._fleet.table["shut"]).tolist()}
        for incarnation in shut.keys() - self._shut:
            row = shut[incarnation]
            log.warning("a worker is shut out", worker=self._name(row), reason=self._health.reason(row, now))
        for incarnation in self._shut - shut.keys():
            if (back := self._fleet.row(incarnation)) is not None:
                log.info("a worker may get requests again", worker=self._name(back))
        self._shut = set(shut)

    async def _check(self, row: int) -> None:
        """Asks a worker whether it is alive."""
        member = self._members[row]
        async with make_channel(member.grpc_address, self._key) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_SECONDS)
                alive = answer.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.aio.AioRpcError:
                alive = False
        if self._members.get(row) is not None and self._members[row].incarnation == member.incarnation:
            self._health.checked(row, alive, time.monotonic())
