"""The requests of the last minutes, and what they say of latency and objectives."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from services.gateway.metrics import Ended
from services.live import BUCKET_SECONDS, BUCKETS, WINDOW_SECONDS, Quantiles

_MOST = 20_000  # requests that are kept
_LATELY_SECONDS = 10.0
_COUNTED = ("ok", "server_error")  # for objectives: what clients did wrong or gave up says nothing of the cluster


class Objectives(NamedTuple):
    """Aims in seconds; infinite: none."""

    ttft: float
    tpot: float

    @property
    def are_set(self) -> bool:
        """Whether there is any."""
        return math.isfinite(self.ttft) or math.isfinite(self.tpot)

    def kept(self, request: Ended) -> bool:
        """Whether a request ended well and in time."""
        return request.outcome == "ok" and (request.ttft or 0) <= self.ttft and (request.tpot or 0) <= self.tpot


class Recent:
    """The requests that ended in the last minutes."""

    def __init__(self) -> None:
        self._ring: deque[Ended] = deque(maxlen=_MOST)

    def add(self, request: Ended) -> None:
        """A request has ended."""
        self._ring.append(request)

    def of(self, now: float) -> list[Ended]:
        """Those of the last minutes, oldest first. `now`: monotonic seconds, as all times here."""
        while self._ring and self._ring[0].at < now - WINDOW_SECONDS:
            self._ring.popleft()
        return list(self._ring)


def per_second(requests: Sequence[Ended], now: float) -> float:
    """How many ended lately."""
    return sum(request.at >= now - _LATELY_SECONDS for request in requests) / _LATELY_SECONDS


def outcomes(requests: Iterable[Ended]) -> dict[str, int]:
    """How many ended how."""
    return dict(Counter(request.outcome for request in requests))


def quantiles(values: Sequence[float]) -> Quantiles:
    """Of seconds."""
    if not values:
        return Quantiles()
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Quantiles(p50=p50, p95=p95, p99=p99)


def ttfts(requests: Iterable[Ended]) -> list[float]:
    """Seconds to the first token of those that had one."""
    return [request.ttft for request in requests if request.ttft is not None]


def tpots(requests: Iterable[Ended]) -> list[float]:
    """Seconds for each token after it."""
    return [request.tpot for request in requests if request.tpot is not None]


def attainment(requests: Iterable[Ended], objectives: Objectives) -> float | None:
    """Part of the requests that kept to the objectives; None: there are no objectives, or no requests."""
    kept = [objectives.kept(request) for request in requests if request.outcome in _COUNTED]
    return sum(kept) / len(kept) if kept and objectives.are_set else None


def buckets(requests: Iterable[Ended], now: float) -> list[list[Ended]]:
    """By when they ended, oldest first."""
    found: list[list[Ended]] = [[] for _ in range(BUCKETS)]
    for request in requests:
        age = bucket_of(now) - bucket_of(request.at)
        if 0 <= age < BUCKETS:
            found[BUCKETS - 1 - age].append(request)
    return found


def bucket_of(at: float) -> int:
    """Number of the bucket of a time."""
    return int(at // BUCKET_SECONDS)
