"""Arrivals: the right rate, the right spread, the same ones for the same seed."""

from itertools import islice

import numpy as np
import pytest

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.load.arrivals import arrival_times


def times(count: int, **settings: object) -> np.ndarray:
    return np.array(list(islice(arrival_times(LoadConfig(url="", **settings)), count)))


def spread(values: np.ndarray) -> float:
    gaps = np.diff(values)
    return float(gaps.std() / gaps.mean())


def test_constant() -> None:
    assert times(4, arrival="constant", rate=2.0).tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"arrival": "poisson"}, 1.0),
        ({"arrival": "gamma", "burstiness": 1.0}, 1.0),
        ({"arrival": "gamma", "burstiness": 0.25}, 2.0),
        ({"arrival": "gamma", "burstiness": 4.0}, 0.5),
    ],
)
def test_mean_and_spread_of_gaps(settings: dict[str, object], expected: float) -> None:
    values = times(40_000, rate=5.0, **settings)
    assert np.diff(values).mean() == pytest.approx(0.2, rel=0.05)
    assert spread(values) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("start", "end"), [(1.0, 9.0), (9.0, 1.0), (4.0, 4.0)])
def test_a_ramp_has_its_rate_at_every_moment(start: float, end: float) -> None:
    seconds = 4000.0
    values = times(40_000, arrival="ramp", rate=start, ramp_to=end, duration=seconds)
    counted, edges = np.histogram(values, bins=10, range=(0, seconds))
    middle = (edges[:-1] + edges[1:]) / 2
    expected = (start + (end - start) * middle / seconds) * seconds / 10
    assert counted == pytest.approx(expected, rel=0.12)
    later = values[values > seconds]
    assert np.diff(later[:500]).mean() == pytest.approx(1 / end, rel=0.15)


def test_seeds() -> None:
    assert times(50, rate=1.0, seed=3).tolist() == times(50, rate=1.0, seed=3).tolist()
    assert times(50, rate=1.0, seed=3).tolist() != times(50, rate=1.0, seed=4).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": None},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"rate": 1.0, "arrival": "ramp"},
        {"rate": 1.0, "arrival": "ramp", "ramp_to": 2.0},
        {"rate": 1.0, "arrival": "gamma", "burstiness": 0.0},
    ],
)
def test_what_cannot_be(settings: dict[str, object]) -> None:
    with pytest.raises(BenchError):
        times(1, **settings)
