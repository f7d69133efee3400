"""The highest rate at which enough requests meet the SLO: doubles until a run fails, then bisects."""

import asyncio

import msgspec

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Experiment, Probe, Run, Search
from bench.measure.record import Record
from bench.sweep import INTERRUPTED, at_load

_OFFERED = 0.9  # share of the asked rate that must have been sent
_LASTING = 2.0  # times an answer takes that a load must last, so that it builds up


_NONE = "no rate can hold"
_GONE = ("connection_refused", "connection_failed")  # these tell of a server that is down, not of a slow one


class Bracket:
    """Between the highest rate that held and the lowest that failed. Rates in requests per second."""

    def __init__(self, start: float, tolerance: float) -> None:
        """`tolerance`: width, as a share of the rate that held, at which the search is over."""
        self.held = 0.0  # 0: none yet
        self.failed: float | None = None
        self._start = start
        self._tolerance = tolerance

    def next_rate(self) -> float | None:
        """The rate to try now; None when the bracket is narrow enough."""
        if self.failed is None:
            return 2 * self.held or self._start
        if not self.held:
            return self.failed / 2
        if self.width <= self._tolerance:
            return None
        return (self.held + self.failed) / 2

    @property
    def width(self) -> float:
        """Relative; infinite while one end is open."""
        return float("inf") if self.failed is None or not self.held else (self.failed - self.held) / self.held

    def add(self, rate: float, holds: bool) -> None:
        """What came of the rate that `next_rate` gave."""
        if holds:
            self.held = rate
        else:
            self.failed = rate


async def find_goodput(
    base: LoadConfig,
    probe: Probe,
    *,
    attainment: float = 0.9,
    start: float = 1.0,
    tolerance: float = 0.05,
    max_probes: int = 16,
    stop: asyncio.Event | None = None,
) -> Experiment:
    """Searches from `start` requests per second; the runs of the Experiment are sorted by rate.

    A rate holds when at least `attainment` of its requests met the SLO. If `start` does not, requests are sent one at
    a time: if that does not either, no rate can. The search ends early, and `stopped_because` says why, when a run
    cannot be made, tells of the load generator instead of the server, or was too short for the load to build up; when
    `stop` is set; after `max_probes` runs. Raises BenchError when there is no run at all, or no SLO.
    """
    if start <= 0 or tolerance <= 0:
        raise BenchError(f"the search needs a rate ({start:g}) and a tolerance ({tolerance:g}) above 0")
    bracket = Bracket(start, tolerance)
    runs: dict[float, Run] = {}
    probes = 0

    async def ask(config: LoadConfig, label: str) -> Run:
        # A seed of its own: prompts of an earlier probe may be in the server's cache.
        nonlocal probes
        probes += 1
        return await probe(msgspec.structs.replace(config, seed=base.seed + probes - 1), label)

    async def search() -> str:
        """Why it ended early; empty: it did not."""
        while rate := bracket.next_rate():
            if probes >= max_probes:
                return _exhausted(bracket, max_probes)
            run = await ask(at_load(base, rate), f"{rate:.4g} req/s")
            share = _attained(run)
            runs[rate] = msgspec.structs.replace(run, load=rate)
            if reason := _doubt(run):
                return f"at {rate:.4g} req/s: {reason}"
            holds = share >= attainment
            if holds and (reason := _too_short(run)):
                return f"at {rate:.4g} req/s: {reason}"
            first_failed = not bracket.held and bracket.failed is None
            bracket.add(rate, holds)
            if first_failed and not holds and probes < max_probes:
                alone = await ask(at_load(base, 1, "concurrency"), "one at a time")
                if reason := _doubt(alone):
                    return f"one at a time: {reason}"
                if _attained(alone) < attainment:
                    return f"{_NONE}: even one at a time, {_attained(alone):.1%} of the requests met the SLO"
        return ""

    try:
        stopped_because = await search()
    except BenchError as error:
        if not runs:
            raise
        stopped_because = str(error)
    if stop is not None and stop.is_set():
        stopped_because = INTERRUPTED
    done = [runs[rate] for rate in sorted(runs)]
    best = runs[bracket.held].summary.goodput if bracket.held else None
    met = done[0].summary.goodput
    slo = met.slo if met else ""
    return Experiment(
        kind="goodput",
        title=f"{done[0].config.model}: highest rate at which {100 * attainment:.4g} % meet {slo}",
        runs=done,
        search=Search(
            attainment=attainment,
            rate=bracket.held,
            failed_rate=bracket.failed,
            goodput=best.requests_per_s if best else 0.0,
            finished=not stopped_because or stopped_because.startswith(_NONE),
        ),
        stopped_because=stopped_because,
    )


def _exhausted(bracket: Bracket, probes: int) -> str:
    if bracket.failed is None:
        return f"after {probes} runs no rate failed: raise --rate or --max-probes"
    if not bracket.held:
        return f"after {probes} runs no rate held: lower --rate or raise --max-probes"
    return f"after {probes} runs the rate is known to {bracket.width:.1%}: raise --max-probes"


def _attained(run: Run) -> float:
    """Share of requests that met the SLO. Raises BenchError without one."""
    if run.summary.goodput is None:
        raise BenchError("goodput needs an SLO: --slo ttft=500ms,tpot=50ms")
    return run.summary.goodput.attainment


def _doubt(run: Run) -> str:
    """Why the run tells nothing of the server; empty if it does.

    That no request was completed does tell: the server failed them all.
    """
    summary = run.summary
    if summary.interrupted:
        return INTERRUPTED
    if not summary.requests:
        return "no request was counted; raise --duration or --num-requests"
    if gone := sum(summary.errors.get(kind, 0) for kind in _GONE):
        return f"the server was not there for {gone} of {summary.requests} requests"
    lags = (summary.send_lag_ms.p99, summary.loop_lag_ms.p99)
    late = any(lag is not None and lag > run.config.max_send_lag_ms for lag in lags)
    if not summary.valid and (summary.completed or late):
        return "; ".join(summary.invalid_because)
    if (share := offered(run.result.records)) < _OFFERED:
        return f"the load generator sent only {share:.0%} of that rate; use more --workers, or free the machine"
    return ""


def _too_short(run: Run) -> str:
    """Why a run that held does not show that its rate would; empty if it does."""
    answer_ms = run.summary.e2e_ms.p50
    sent = [record.sent for record in run.result.records if record.turn == 0 and record.sent >= 0]
    if answer_ms is None or not sent or max(sent) - min(sent) >= _LASTING * answer_ms / 1e3:
        return ""
    return (
        f"all was sent within {max(sent) - min(sent):.2g} s, but an answer takes {answer_ms / 1e3:.2g} s: "
        "the load did not build up; use --duration, or more --num-requests"
    )


def offered(records: list[Record]) -> float:
    """Rate at which conversations were started over that of their schedule, at most 1. The server has no part in it."""
    starts = [record for record in records if record.turn == 0 and record.scheduled >= 0 and record.sent >= 0]
    if not starts:
        return 1.0
    due, sent = [record.scheduled for record in starts], [record.sent for record in starts]
    planned, took = max(due) - min(due), max(sent) - min(sent)
    return planned / took if took > planned > 0 else 1.0
