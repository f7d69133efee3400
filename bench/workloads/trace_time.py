"""When the requests of a trace are replayed: jitter, order, window, limit and speed, in this sequence."""

import math
import re

import numpy as np
from numpy.typing import NDArray

from bench.config import WorkloadConfig
from bench.errors import BenchError

_STREAM = 0x71773  # keeps the jitter apart from other draws with the same seed
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"\d+(?:\.\d+)?(?:ms|s|m|h)"
_TIME = rf"(?:{_PART})+|\d+(?:\.\d+)?"
_WINDOW = re.compile(rf"\s*({_TIME})?\s*-\s*({_TIME})?\s*")


def schedule(
    timestamps: NDArray[np.float64], config: WorkloadConfig, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """(rows in the order of their replay, seconds since its start for each). Both have one entry a request replayed.

    `timestamps` are in seconds, one a row, in any order. The window counts from the earliest of them and is in the
    trace's own time: speed comes after it. The first request of the window is sent at 0.

    Raises BenchError for a bad window, speed or limit, and when the window holds no request.
    """
    if not 0 < config.speed < math.inf:
        raise BenchError(f"speed must be above 0, not {config.speed:g}; 2 replays twice as fast")
    if config.limit < 0:
        raise BenchError(f"limit must be a number of requests, or 0 for all of them, not {config.limit}")
    start, end = parse_window(config.window)
    times = dequantise(timestamps - timestamps.min(), seed)
    order = np.argsort(times, kind="stable")
    times = times[order]
    first, stop = (int(row) for row in np.searchsorted(times, (start, end)))
    if first == stop:
        raise BenchError(
            f"window {config.window!r} holds no request: those of the trace come between 0s and {times[-1]:.3f}s"
        )
    if config.limit:
        stop = min(stop, first + config.limit)
    return order[first:stop], (times[first:stop] - times[first]) / config.speed


def dequantise(times: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Timestamps of a trace that were rounded to a coarse clock, spread over its ticks; others as they are.

    A clock counts as coarse when more than two requests share a timestamp on average: replayed as they are they would
    come in bursts that no client made. Each request is moved by U(0, tick), where the tick is the median distance of
    neighbouring timestamps.
    """
    ticks = np.unique(times)
    if len(ticks) < 2 or 2 * len(ticks) >= len(times):
        return times
    rng = np.random.default_rng((seed, _STREAM))
    return times + rng.uniform(0.0, float(np.median(np.diff(ticks))), len(times))


def parse_window(text: str) -> tuple[float, float]:
    """(start, end) in seconds of "10m-20m", "90s-", "-1h30m"; the end does not belong to it. Empty: all of the trace.

    Raises BenchError.
    """
    if not text.strip():
        return 0.0, math.inf
    match = _WINDOW.fullmatch(text)
    if match is None or not any(match.groups()):
        raise BenchError(f"window {text!r} is no part of a trace; write e.g. 10m-20m, 90s- or 1h-1h30m")
    start = _seconds(match[1]) if match[1] else 0.0
    end = _seconds(match[2]) if match[2] else math.inf
    if start >= end:
        raise BenchError(f"window {text!r} ends before it starts; write e.g. 10m-20m")
    return start, end


def _seconds(text: str) -> float:
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", text)
    return sum(float(value) * _UNITS[unit] for value, unit in parts) if parts else float(text)
