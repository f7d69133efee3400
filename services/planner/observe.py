"""What the planner is told of a model, put together from gateways, routers and workers as `planner.window` wants it.

Gateways count what came, whatever became of it; routers say what waits; heartbeats of workers say what was cached and
how many sequences are decoded at once. A source that does not answer makes what it would have told NaN, not 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc.aio
import structlog
from prometheus_client.parser import text_string_to_metric_families

from planner.window import NAN, Window
from services.cluster_state import ClusterState
from services.gateway.console.history import Counts
from services.rpc import cluster_pb2, cluster_pb2_grpc, router_pb2, router_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

log = structlog.get_logger()

_ANSWER_SECONDS = 1.0
_TOTALS = {
    "tandem_choices_total": "choices",
    "tandem_choices_turned_away_total": "turned_away",
    "tandem_request_prompt_tokens_total": "prompt_tokens",
    "tandem_answers_total": "answers",
    "tandem_answer_tokens_total": "answer_tokens",
    "tandem_itl_seconds_sum": "gap_seconds",
    "tandem_itl_seconds_count": "gaps",
}
_BUCKETS = {"tandem_ttft_seconds_bucket": "ttft", "tandem_tpot_seconds_bucket": "tpot"}

Channel = Callable[[str], grpc.aio.Channel]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds, and the share of requests that is to keep to them."""

    ttft: float
    tpot: float
    attainment: float


@dataclass(slots=True)
class Counted:
    """Of one model, since a gateway's start, or between two readings."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: {"ttft": {}, "tpot": {}})  # by upper bound

    def since(self, before: Counted) -> Counted:
        """What came after `before`."""
        totals = {name: value - before.totals.get(name, 0.0) for name, value in self.totals.items()}
        buckets = {
            name: {bound: count - before.buckets[name].get(bound, 0.0) for bound, count in of.items()}
            for name, of in self.buckets.items()
        }
        return Counted(defaultdict(float, totals), buckets)

    def add(self, other: Counted) -> None:
        """Both together."""
        for name, value in other.totals.items():
            self.totals[name] += value
        for name, of in other.buckets.items():
            for bound, count in of.items():
                self.buckets[name][bound] = self.buckets[name].get(bound, 0.0) + count

    @property
    def possible(self) -> bool:
        """Whether these are numbers that counters can have grown by."""
        values = [*self.totals.values(), *(count for of in self.buckets.values() for count in of.values())]
        return all(math.isfinite(value) and value >= 0 for value in values)


def counted(text: str) -> dict[str, Counted]:
    """What a gateway's metrics say of each model. Raises ValueError for what are no metrics."""
    found: dict[str, Counted] = defaultdict(Counted)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = sample.labels.get("model", "")
            if not model:
                continue
            if (name := _TOTALS.get(sample.name)) is not None:
                found[model].totals[name] += sample.value
            elif (name := _BUCKETS.get(sample.name)) is not None:
                found[model].buckets[name][float(sample.labels["le"])] = sample.value
    return dict(found)


def quantile(buckets: dict[float, float], share: float) -> float:
    """The value that `share` of what was observed stays under, between the bounds of its bucket. NaN: nothing was."""
    bounds = sorted(buckets)
    counts = [buckets[bound] for bound in bounds]
    if not counts or not counts[-1] > 0:
        return NAN
    wanted = share * counts[-1]
    place = bisect_left(counts, wanted)
    low, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    if math.isinf(bounds[place]):
        return low
    inside = counts[place] - below
    return low + (bounds[place] - low) * ((wanted - below) / inside if inside > 0 else 1.0)


def share_under(buckets: dict[float, float], value: float) -> float:
    """The share of what was observed that is at most `value`. NaN: nothing was observed."""
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]] > 0:
        return NAN
    low, below = 0.0, 0.0
    for bound in bounds:
        if value <= bound:
            part = 0.0 if math.isinf(bound) else (value - low) / (bound - low)
            return (below + part * (buckets[bound] - below)) / buckets[bounds[-1]]
        low, below = bound, buckets[bound]
    return 1.0


class Observer:
    """Reads all sources at the end of each window."""

    def __init__(self, state: ClusterState, channel: Channel, objectives: Objectives) -> None:
        self._state = state
        self._channel = channel
        self._objectives = objectives
        self._gateways: dict[str, dict[str, Counted] | None] = {}  # by incarnation; None: it did not answer
        self._workers: dict[str, Counts] = {}
        self._batches: dict[str, list[int]] = defaultdict(list)  # by model: sequences decoded at once, each heartbeat
        self._read_at = 0.0  # monotonic; 0: never
        state.on_change(self._heard)

    async def windows(self, models: Iterable[str]) -> dict[str, Window]:
        """What came since the call before, of these models and those that gateways serve. Nothing is known at first."""
        now, is_first = time.monotonic(), not self._read_at
        seconds, self._read_at = now - self._read_at, now
        came, queued = await asyncio.gather(self._came(is_first), self._queued())
        cached = self._cached()
        windows = {}
        served = (model for told in self._gateways.values() if told is not None for model in told)
        for model in sorted({*models, *served}):
            batches = self._batches.pop(model, [])
            told = {} if came is None or is_first else self._of_requests(came.get(model, Counted()), cached.get(model))
            windows[model] = Window(
                at=time.time(),
                seconds=0.0 if is_first else seconds,
                queued=NAN if queued is None else queued.get(model, 0.0),
                prefill_rate=self._prefill_rate(model),
                batch=sum(batches) / len(batches) if batches else NAN,
                **told,
            )
        return windows

    def _of_requests(self, came: Counted, reused: float | None) -> dict[str, float]:
        if not came.possible:
            log.warning("what gateways count is impossible, and not used")
            return {}
        totals, aims = came.totals, self._objectives
        prompt = _ratio(totals["prompt_tokens"], totals["choices"])
        under = [share_under(came.buckets["ttft"], aims.ttft), share_under(came.buckets["tpot"], aims.tpot)]
        # Who keeps to one is taken to keep to the other as often as anybody.
        attained = math.prod(share for share in under if not math.isnan(share)) if not math.isnan(under[0]) else NAN
        return {
            "arrivals": totals["choices"] + totals["turned_away"],
            "prompt_tokens": prompt,
            "cached_tokens": NAN if reused is None else prompt * reused,
            "output_tokens": _ratio(totals["answer_tokens"], totals["answers"]),
            "ttft": quantile(came.buckets["ttft"], aims.attainment),
            "tpot": quantile(came.buckets["tpot"], aims.attainment),
            "attained": attained,
            "token_seconds": _ratio(totals["gap_seconds"], totals["gaps"]),
        }

    async def _came(self, is_first: bool) -> dict[str, Counted] | None:
        """By model, of all gateways together. None: one of them did not tell, now or at the time before."""
        gateways = self._state.members("gateway")
        texts = await asyncio.gather(*map(self._metrics, gateways))
        sums: dict[str, Counted] = defaultdict(Counted)
        complete, before = bool(gateways), self._gateways
        self._gateways = {}
        for gateway, text in zip(gateways, texts, strict=True):
            told = self._gateways[gateway.incarnation] = _counted(text)
            # One that has come since the reading before has counted from 0.
            known = before.get(gateway.incarnation, None if is_first else {})
            if told is None or known is None:
                complete = False
                continue
            for model, of in told.items():
                sums[model].add(of.since(known.get(model, Counted())))
        return sums if complete else None

    async def _metrics(self, member: cluster_pb2.Member) -> str | None:
        stub = cluster_pb2_grpc.NodeStub(self._channel(member.grpc_address))
        try:
            reply = await answer_of(stub.Metrics(cluster_pb2.MetricsRequest(), timeout=_ANSWER_SECONDS))
        except (grpc.aio.AioRpcError, ChannelClosed):
            return None
        return bytes(reply.text).decode(errors="replace")

    async def _queued(self) -> dict[str, float] | None:
        """Requests that wait in routers, by model. None: a router does not say."""
        routers = self._state.members("router")
        answers = await asyncio.gather(*map(self._status, routers))
        sums: dict[str, float] = defaultdict(float)
        for answer in answers:
            if answer is None:
                return None
            for model in answer.models:
                sums[model.name] += model.queued
        return sums if routers else None

    async def _status(self, member: cluster_pb2.Member) -> router_pb2.StatusReply | None:
        stub = router_pb2_grpc.RouterStub(self._channel(member.grpc_address))
        try:
            reply: router_pb2.StatusReply = await answer_of(
                stub.Status(router_pb2.StatusRequest(), timeout=_ANSWER_SECONDS)
            )
        except (grpc.aio.AioRpcError, ChannelClosed):
            return None
        return reply

    def _cached(self) -> dict[str, float]:
        """By model: the share of prompt tokens that nobody had to compute, of what workers have counted since."""
        reused: dict[str, int] = defaultdict(int)
        computed: dict[str, int] = defaultdict(int)
        before, self._workers = self._workers, {}
        for member in self._state.members("prefill", "decode", "aggregated"):
            now = self._workers[member.incarnation] = Counts.of(member.load)
            if (then := before.get(member.incarnation)) is not None:
                reused[member.model.name] += now.reused - then.reused
                computed[member.model.name] += now.computed - then.computed
        every = {model: reused[model] + computed[model] for model in computed}
        return {model: reused[model] / total for model, total in every.items() if total > 0}

    def _prefill_rate(self, model: str) -> float:
        rates = [
            member.load.prefill_tokens_per_second
            for member in self._state.members("prefill", "aggregated")
            if member.model.name == model and member.load.HasField("prefill_tokens_per_second")
        ]
        return sum(rates) / len(rates) if rates else NAN

    def _heard(self, change: str, member: cluster_pb2.Member) -> None:
        if change == "updated" and member.role in ("decode", "aggregated") and member.load.running:
            self._batches[member.model.name].append(member.load.running)


def _counted(text: str | None) -> dict[str, Counted] | None:
    if text is None:
        return None
    try:
        return counted(text)
    except ValueError as error:
        log.warning("a gateway's metrics are malformed", error=str(error))
        return None


def _ratio(value: float, count: float) -> float:
    return value / count if count > 0 else NAN
