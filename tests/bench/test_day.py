"""Days that are made of recorded hours."""

import numpy as np
import pytest

from bench.planner_days import hours_around
from bench.replay.day import DAY, bursts, by_the_hour, day_of
from planner.simulator.demand import Demand, Trace

NOON = slice(9, 15)
NIGHT = [*range(3), *range(21, 24)]


def an_hour(requests: int = 3600) -> Trace:
    """Conversations of four, each with a block that all have before its own."""
    demands = [
        Demand(1100, 100, [b"all".ljust(16, b"\0"), (row // 4).to_bytes(16, "little")]) for row in range(requests)
    ]
    return Trace("hour", demands, np.sort(np.random.default_rng(1).uniform(0, 3599, requests)))


def by_hour(times: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.bincount((times // 3600).astype(int), minlength=24)


def test_a_day_has_its_rate_and_its_night() -> None:
    day = day_of(an_hour(), rate=0.5, share=0.6)
    assert len(day.times) / DAY == pytest.approx(0.5, rel=0.05) and (np.diff(day.times) >= 0).all()
    counts = by_hour(day.times)
    assert counts[NOON].mean() / counts[NIGHT].mean() == pytest.approx(1.55 / 0.45, rel=0.15)


def test_a_conversation_is_kept_or_left_out_as_a_whole_and_is_another_one_in_the_next_hour() -> None:
    day = day_of(an_hour(), rate=0.5, share=0.0, seconds=7200)
    sizes = np.unique([demand.hashes[1] for demand in day.demands], return_counts=True)[1]
    assert np.mean(sizes == 4) > 0.99  # the last one may end after the day


def test_more_than_was_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="left at noon"):
        day_of(an_hour(), rate=0.7, share=0.6)


def test_bursts_have_the_variation_that_was_asked_for() -> None:
    day = bursts(an_hour(100), rate=0.5, share=0.0, variation=2.0)
    gaps = np.diff(day.times)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05)
    assert len(day.times) / DAY == pytest.approx(0.5, rel=0.05)
    swinging = by_hour(bursts(an_hour(100), rate=0.5, share=0.6, variation=1.0).times)
    assert swinging[NOON].mean() / swinging[NIGHT].mean() == pytest.approx(1.55 / 0.45, rel=0.15)


def test_means_by_the_hour() -> None:
    assert list(by_the_hour(np.array([10.0, 20.0, 3700.0]), np.array([1.0, 2.0, 5.0]), 7200)) == [1.5, 5.0]


def test_hours_of_a_day_follow_each_other() -> None:
    day = Trace("day", [an_hour(1).demands[0]] * 48, 1800.0 * np.arange(48))  # two an hour
    assert hours_around(day, 12).times.tolist() == [0.0, 1800.0, 3600.0]  # 11:30, 12:00, 12:30
    assert hours_around(day, 6, 12).times.tolist() == [0.0, 1800.0, 3600.0, 3600.0, 5400.0, 7200.0]
