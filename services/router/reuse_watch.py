"""What the router says of itself: whether placements go by caches, and whether what it predicts of them holds."""

from __future__ import annotations

import structlog

from router.self_check import Mode, ReuseCheck, is_alarm, judge
from services.router.metrics import OVERLAPS, RouterMetrics
from services.router.watchers import Watchers
from services.rpc import router_pb2

log = structlog.get_logger()


class ReuseWatch:
    """Compares predictions with what was found; says once when load alone decides, though the policy is another."""

    def __init__(self, policy: str, watchers: Watchers, metrics: RouterMetrics) -> None:
        self._policy = policy
        self._watchers = watchers
        self._metrics = metrics
        self._check = ReuseCheck()
        self._mode = Mode.PREFIX
        self._why = ""

    def ended(self, predicted: int, found: int, now: float) -> None:
        """So many tokens of a prompt were believed to be cached, and so many were; of any router."""
        self._check.observe(predicted, found, now)

    def count(self, predicted: int, found: int, block_size: int) -> None:
        """The same for the counters, of one router only."""
        for kind, tokens in zip(OVERLAPS, (predicted, found, min(predicted, found)), strict=True):
            self._metrics.overlap.labels(kind).inc(tokens / block_size)

    def tick(self, now: float) -> None:
        """Once a second."""
        self._check.tick(now)
        states = self._watchers.states(now)
        for state, count in states.items():
            self._metrics.caches.labels(state).set(count)
        self._metrics.precision.set(self._check.precision)
        self._metrics.recall.set(self._check.recall)
        followed = states["known"] + states["unknown"]  # the latter for some seconds only
        mode, self._why = judge(self._policy, sum(states.values()), followed, self._check)
        if mode is not self._mode and is_alarm(self._policy, mode):
            log.warning("requests are routed by load alone", reason=self._why)
        elif mode is not self._mode and mode is Mode.PREFIX:
            log.info("requests are routed by cached prefixes again")
        self._mode = mode
        for each in Mode:
            self._metrics.mode.labels(each.value).set(each is mode)

    def status(self, now: float) -> router_pb2.StatusReply:
        """As of the last tick."""
        return router_pb2.StatusReply(
            policy=self._policy,
            mode=self._mode.value,
            reason=self._why,
            precision=self._check.precision,
            recall=self._check.recall,
            caches=self._watchers.states(now),
        )
