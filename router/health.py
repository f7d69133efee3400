"""Who is left out of decisions, for now: workers that fail, stand still or do far worse than their peers, and pairs.

All of it comes from how attempts ended and from workers' heartbeats. A transfer of KV that failed is laid to the pair
of the prefill and the decode worker; to the prefill worker itself when it fails with several. What is found is a column
of the fleet's table, `shut`, and for each decode worker the few prefill workers that it is kept apart from.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from router.breaker import FAULTS, Breaker, BreakerState
from router.fleet import Fleet
from router.outliers import Outliers

_STALL_SECONDS = 5.0  # without a step, with work to do


class Outcome(Enum):
    """How an attempt ended, as its gateway saw it."""

    UNTOLD = "untold"  # it says nothing of the workers
    OK = "ok"
    CLIENT_ERROR = "client_error"
    WORKER_ERROR = "worker_error"
    LOST = "lost"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"


_FAULTS = (Outcome.WORKER_ERROR, Outcome.LOST, Outcome.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Report:
    """An attempt that has ended. Workers are rows of the fleet's table; None: none, or one that is gone."""

    key: Hashable
    decode: int | None
    prefill: int | None
    outcome: Outcome
    prefill_failed: bool = False  # the decode worker computed the prompt, as `prefill` did not deliver
    answered: bool = False  # a token came
    late: float | None = None  # actual seconds to the first token against those that were predicted


class Health:
    """Breakers of workers and pairs, stalls and outliers. Times are monotonic seconds."""

    def __init__(self, fleet: Fleet) -> None:
        self.apart: dict[int, frozenset[int]] = {}  # decode worker -> prefill workers that it gets nothing from
        self._fleet = fleet
        self._outliers = Outliers(fleet)
        self._workers: dict[int, Breaker] = {}  # those that failed lately
        self._pairs: dict[tuple[int, int], Breaker] = {}  # (prefill, decode)
        self._steps: dict[int, tuple[int, float]] = {}  # of workers with work to do, and since when

    def sent(self, key: Hashable, decode: int, prefill: int | None, now: float) -> None:
        """An attempt goes to these workers."""
        breakers = [self._workers.get(decode)]
        if prefill is not None:
            breakers += [self._workers.get(prefill), self._pairs.get((prefill, decode))]
        for breaker in breakers:
            if breaker is not None and breaker.state(now) is BreakerState.HALF_OPEN:
                breaker.sent(key, now)
                self._refresh(now)

    def ended(self, report: Report, now: float) -> None:
        """Books how an attempt ended."""
        failed = report.outcome in _FAULTS
        good = report.outcome is Outcome.OK or (report.outcome is Outcome.ABORTED and report.answered)
        decode, prefill, key = report.decode, report.prefill, report.key
        if decode is not None:
            if failed:
                self._workers.setdefault(decode, Breaker()).failed(key, now)
            elif breaker := self._workers.get(decode):
                _tell(breaker, key, good, now)
            if failed or good:
                self._outliers.ended(decode, failed=failed)
        if prefill is not None and decode is not None:
            self._transferred(report, prefill, decode, now, good=good)
        computing = decode if prefill is None else prefill
        if report.late and computing is not None and not report.prefill_failed:
            self._outliers.timed(computing, report.late)
        if self._workers or self._pairs:
            self._refresh(now)

    def heard(self, row: int, *, running: int, steps: int, now: float) -> None:
        """A worker's heartbeat: requests that it computes step by step, and steps so far."""
        if not running:
            self._steps.pop(row, None)
        elif (known := self._steps.get(row)) is None or known[0] != steps:
            self._steps[row] = steps, now

    def waiting(self, now: float) -> list[int]:
        """Workers that may come back but are sent nothing: it is time to ask them whether they are alive."""
        return [row for row, breaker in self._workers.items() if breaker.is_waiting(now)]

    def checked(self, row: int, alive: bool, now: float) -> None:
        """The answer of one of those."""
        if (breaker := self._workers.get(row)) and breaker.is_waiting(now):
            breaker.checked(alive, now)
            self._refresh(now)

    def forget(self, row: int) -> None:
        """A worker has left."""
        self._workers.pop(row, None)
        self._steps.pop(row, None)
        self._pairs = {pair: breaker for pair, breaker in self._pairs.items() if row not in pair}
        self._outliers.forget(row)
        self.apart = {decode: prefills - {row} for decode, prefills in self.apart.items() if decode != row}

    def unheard(self) -> None:
        """Heartbeats do not come through: nothing is known of who stands still."""
        self._steps.clear()

    def judge(self, now: float) -> list[tuple[int, str]]:
        """Once a second: what time alone changes, and outliers; (row, "faults" or "lateness") of those put out now."""
        self._workers = {row: breaker for row, breaker in self._workers.items() if not breaker.is_idle(now)}
        self._pairs = {pair: breaker for pair, breaker in self._pairs.items() if not breaker.is_idle(now)}
        self._refresh(now)
        found = self._outliers.judge(self._fleet.table["shut"], now)
        self._refresh(now)
        return found

    def reason(self, row: int, now: float) -> str:
        """Why a worker is shut out."""
        if row in self._stalled(now):
            return f"without a step for {now - self._steps[row][1]:.0f} s, with work to do"
        if (breaker := self._workers.get(row)) and not breaker.passes(now):
            return _said(breaker, now)
        return f"ejected for {max(0.0, self._outliers.until(row) - now):.0f} s more: far worse than its peers"

    def reason_apart(self, prefill: int, decode: int, now: float) -> str:
        """Why a prefill worker is kept apart from a decode worker."""
        return _said(self._pairs[prefill, decode], now) + ", of this pair's transfers"

    def count(self, now: float) -> Counter[tuple[str, str]]:
        """Breakers that are not closed, by ("worker" or "pair", state)."""
        found = Counter(("worker", breaker.state(now).value) for breaker in self._workers.values())
        found.update(("pair", breaker.state(now).value) for breaker in self._pairs.values())
        return found

    def num_ejected(self, now: float) -> int:
        """Workers that are out as outliers."""
        return int(self._outliers.out(now).sum())

    def num_stalled(self, now: float) -> int:
        """Workers that stand still."""
        return len(self._stalled(now))

    # Inside

    def _transferred(self, report: Report, prefill: int, decode: int, now: float, *, good: bool) -> None:
        """The prompt was, or was to be, computed by a prefill worker."""
        pair, key = (prefill, decode), report.key
        if report.prefill_failed:
            self._pairs.setdefault(pair, Breaker()).failed(key, now)
            self._workers.setdefault(prefill, Breaker(witnesses=2)).failed(key, now, decode)
            return
        for breaker in (self._pairs.get(pair), self._workers.get(prefill)):
            if breaker is not None:
                _tell(breaker, key, good, now)

    def _stalled(self, now: float) -> list[int]:
        return [row for row, (_, since) in self._steps.items() if now - since >= _STALL_SECONDS]

    def _refresh(self, now: float) -> None:
        """Writes what decisions look at."""
        shut = self._outliers.out(now)
        shut[[row for row, breaker in self._workers.items() if not breaker.passes(now)]] = True
        shut[self._stalled(now)] = True
        self._fleet.table["shut"] = shut
        apart: defaultdict[int, set[int]] = defaultdict(set)
        for (prefill, decode), breaker in self._pairs.items():
            if not breaker.passes(now):
                apart[decode].add(prefill)
        self.apart = {decode: frozenset(prefills) for decode, prefills in apart.items()}


def _tell(breaker: Breaker, key: Hashable, good: bool, now: float) -> None:
    if good:
        breaker.succeeded(key, now)
    else:
        breaker.ended(key)


def _said(breaker: Breaker, now: float) -> str:
    if breaker.state(now) is BreakerState.OPEN:
        return f"breaker open for {breaker.half_open_at - now:.0f} s more after {FAULTS} faults"
    return "breaker half open, a probe is under way"
