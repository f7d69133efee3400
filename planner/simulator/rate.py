"""Tokens per second as a worker measures them and tells the routers."""

import math

_KEPT = 0.9  # weight of what was measured before, at each measurement
_LEAST_SECONDS = 0.05  # that a late fetch was waited for: less says nothing of how fast KV comes
_RETRY_SECONDS = 30.0  # a fetch is forgotten, so that it is tried again


class Rate:
    """A mean over measurements in which the latest count most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._measured_at = -math.inf
        self._was_late = False

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """So many tokens took so long."""
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._measured_at = now
        self._was_late = self._was_late and not tokens

    def late(self, seconds: float, now: float) -> None:
        """Nothing came within so long. The first time in a row may be its source's fault, and others are quicker."""
        if seconds < _LEAST_SECONDS:
            return
        if self._was_late:
            self.add(0, seconds, now)
        self._was_late = True

    @property
    def per_second(self) -> float:
        """NaN: nothing was measured."""
        return self._tokens / self._seconds if self._seconds else math.nan

    def lately(self, now: float) -> float:
        """NaN: nothing was measured lately."""
        return self.per_second if now - self._measured_at <= _RETRY_SECONDS else math.nan
