"""A day made of an hour: recorded requests again and again, fewer of them by night than by day.

The gaps between requests that are left stay as they were recorded, so that bursts are as long as they were; the rate is
brought down by leaving requests out, all of one conversation together. It swings as a day's does, with the least at
midnight, where the trace begins, and the most at noon.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.simulator.demand import Demand, Trace

DAY = 86_400.0  # seconds


def swing(at: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """The rate through the day's mean at these seconds since midnight."""
    factor: NDArray[np.float64] = 1 - share * np.cos(2 * np.pi * at / DAY)
    return factor


def day_of(trace: Trace, *, rate: float, share: float, seconds: float = DAY, seed: int = 0) -> Trace:
    """`rate`: requests a second, the day's mean. `share`: by how much of it the rate swings. Raises ValueError."""
    length = float(trace.times[-1]) * (1 + 1 / len(trace.times))
    most = len(trace.times) / length / (1 + share)
    if rate > most:
        raise ValueError(f"{rate:g} requests/s are more than {trace.name} has left at noon, {most:.2f} at the most")
    rng = np.random.default_rng(seed)
    groups = np.unique([_conversation(demand, row) for row, demand in enumerate(trace.demands)], return_inverse=True)[1]
    demands, times = list[Demand](), list[float]()
    for turn in range(math.ceil(seconds / length)):
        at = trace.times + turn * length
        kept = rng.random(len(trace.demands))[groups] < swing(at, share) * rate * length / len(trace.times)
        for row in np.flatnonzero(kept & (at < seconds)).tolist():
            demands.append(_again(trace.demands[row], turn))
            times.append(float(at[row]))
    return Trace(f"a day of {trace.name}", demands, np.array(times))


def bursts(trace: Trace, *, rate: float, share: float, variation: float, seconds: float = DAY, seed: int = 0) -> Trace:
    """The trace's lengths in a random order, at times of their own: gaps have a gamma distribution whose coefficient of
    variation is `variation`, 1 for Poisson arrivals, and the rate swings as that of `day_of`.
    """
    rng = np.random.default_rng(seed)
    grid = np.linspace(0.0, seconds, 10_001)
    passed = rate * (grid - share * DAY / (2 * np.pi) * np.sin(2 * np.pi * grid / DAY))  # requests expected until then
    shape = 1 / variation**2
    wanted = passed[-1] * 1.2 + 20 * variation * math.sqrt(passed[-1])
    due = np.cumsum(rng.gamma(shape, 1 / shape, math.ceil(wanted)))
    times = np.interp(due[due < passed[-1]], passed, grid)
    rows = rng.integers(0, len(trace.demands), len(times))
    demands = [_again(trace.demands[row], turn) for turn, row in enumerate(rows.tolist())]
    return Trace(f"bursts of {trace.name}", demands, times)


def by_the_hour(times: NDArray[np.float64], values: NDArray[np.float64], seconds: float) -> Iterator[float]:
    """Means of what was looked at evenly, for each hour."""
    for hour in range(math.ceil(seconds / 3600)):
        inside = (times > hour * 3600) & (times <= (hour + 1) * 3600)
        yield float(values[inside].mean()) if inside.any() else math.nan


def _conversation(demand: Demand, row: int) -> bytes:
    """What all requests of one have: the second block, as the first may be everybody's."""
    return demand.hashes[1] if len(demand.hashes) > 1 else b"row %d" % row


def _again(demand: Demand, turn: int) -> Demand:
    """The same with blocks that no other turn has: hashes of planned traces are numbers of less than 12 bytes."""
    mark = turn.to_bytes(4, "little")
    return replace(demand, hashes=[each[:12] + mark for each in demand.hashes], follows=None)
