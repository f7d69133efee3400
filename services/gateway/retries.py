"""How much of what failed is tried again: a share of requests and some each second, so that trying heals and not harms.

Where nearly everything fails, each try more is load on what is sick already: a request that comes then is told to come
again later. Not counted is who waits for a router or a worker that is gone, nor a stream that has begun: its client
could not repeat it.
"""

from __future__ import annotations

import math
import time

from services.gateway.metrics import GatewayMetrics

_SHARE = 0.2  # tries for each request
_MEMORY = 10.0  # seconds in which what requests brought fades to 1 / e
_PER_SECOND, _SAVED = 10.0, 100.0  # tries, also without requests


class RetryBudget:
    """Of one gateway. Times are monotonic seconds."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._earned = 0.0
        self._saved = _SAVED
        self._at = time.monotonic()

    def earn(self, now: float) -> None:
        """A sequence is placed for the first time."""
        self._pass(now)
        self._earned += _SHARE

    def spend(self, now: float) -> bool:
        """Whether one more try is in it; then it is taken."""
        self._pass(now)
        if self._earned >= 1.0:
            self._earned -= 1.0
        elif self._saved >= 1.0:
            self._saved -= 1.0
        else:
            self._metrics.retries_refused.inc()
            return False
        self._metrics.retries.inc()
        return True

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._earned *= math.exp(-passed / _MEMORY)
        self._saved = min(_SAVED, self._saved + passed * _PER_SECOND)
