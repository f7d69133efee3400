"""Tokens per second as a worker measures them and tells the routers."""

import math

_KEPT = 0.9  # weight of what was measured before, at each measurement
_RETRY_SECONDS = 30.0  # a fetch is forgotten, so that it is tried again


class Rate:
    """A mean over measurements in which the latest count most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._measured_at = -math.inf

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """So many tokens took so long."""
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._measured_at = now

    @property
    def per_second(self) -> float:
        """NaN: nothing was measured."""
        return self._tokens / self._seconds if self._seconds else math.nan

    def lately(self, now: float) -> float:
        """NaN: nothing was measured lately."""
        return self.per_second if now - self._measured_at <= _RETRY_SECONDS else math.nan
