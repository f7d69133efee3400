"""Log lines about the start of an engine: how far the loading of weights is, how fast it was, and what comes then."""

import time

import structlog

log = structlog.get_logger()

_GAP_SECONDS = 5.0
_GB = 10**9


class LoadLog:
    """A `Progress` for `Engine.build`."""

    def __init__(self) -> None:
        self._started = self._told = 0.0

    def __call__(self, done: int, total: int, name: str) -> None:
        """`done` of `total` bytes are read; tensor `name` is next or, at the end, was the last."""
        now = time.monotonic()
        if done == 0:
            self._started = self._told = now
        elif done == total:
            seconds = now - self._started
            log.info("weights loaded", gb=_gb(total), seconds=round(seconds, 2), gb_per_second=_gb(total / seconds))
        elif now - self._told > _GAP_SECONDS:
            self._told = now
            log.info("loading weights", gb=_gb(done), of_gb=_gb(total), percent=100 * done // total, tensor=name)

    def stage(self, what: str) -> None:
        """Something that takes seconds begins."""
        log.info("preparing " + what)


def _gb(size: float) -> float:
    return round(size / _GB, 2)
