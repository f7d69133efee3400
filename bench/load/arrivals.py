"""When conversations start in an open loop. All times are seconds since the start of the run."""

import math
from collections.abc import Iterator

import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError

_STREAM = 0xA881  # keeps the draws of arrivals apart from those of workloads with the same seed


def arrival_times(config: LoadConfig) -> Iterator[float]:
    """Endless start times, the same ones for the same seed.

    - constant: every 1 / rate
    - poisson: exponential gaps of mean 1 / rate
    - gamma: gaps of mean 1 / rate and coefficient of variation 1 / sqrt(burstiness)
    - ramp: Poisson with a rate that goes in a line from `rate` to `ramp_to` during `duration`, and stays there

    A trace brings its own times and needs none of these.
    """
    rate = config.rate
    if rate is None or not 0 < rate < math.inf:
        raise BenchError(f"an open loop needs a rate above 0 in requests per second, not {rate}: --rate 4")
    rng = np.random.default_rng((config.seed, _STREAM))
    if config.arrival == "constant":
        return _constant(rate)
    if config.arrival == "gamma":
        if not config.burstiness > 0:
            raise BenchError("--burstiness must be above 0; 1 is Poisson, smaller is burstier")
        return _gamma(rate, config.burstiness, rng)
    if config.arrival == "ramp":
        if config.ramp_to is None or config.ramp_to <= 0 or not config.duration:
            raise BenchError("a ramp needs the rate at its end and its length: --ramp-to 8 --duration 2m")
        return _ramp(rate, config.ramp_to, config.duration, rng)
    return _gamma(rate, 1.0, rng)


def _constant(rate: float) -> Iterator[float]:
    count = 0
    while True:
        yield count / rate
        count += 1


def _gamma(rate: float, shape: float, rng: np.random.Generator) -> Iterator[float]:
    now = 0.0
    while True:
        for gap in rng.gamma(shape, 1 / (rate * shape), 1024):
            now += float(gap)
            yield now


def _ramp(start: float, end: float, seconds: float, rng: np.random.Generator) -> Iterator[float]:
    """The n-th arrival is where the integral of the rate reaches the n-th sum of unit exponentials."""
    slope = (end - start) / seconds
    whole = (start + end) / 2 * seconds  # arrivals during the ramp, on average
    total = 0.0
    while True:
        total += float(rng.exponential())
        if total >= whole:
            yield seconds + (total - whole) / end
        elif abs(slope) * seconds < 1e-9 * start:
            yield total / start
        else:
            yield (math.sqrt(start * start + 2 * slope * total) - start) / slope
