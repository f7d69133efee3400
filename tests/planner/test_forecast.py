"""Forecasts: each model against what can be computed by hand, who is picked, and how often the band holds."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.forecast.autoregressive import Autoregressive
from planner.forecast.holt_winters import DAY, HoltWinters
from planner.forecast.level import Level
from planner.forecast.picked import Picked
from planner.forecast.windows import Picking
from planner.window import NAN, Window

ONE, FOUR = np.array([1]), np.array([4])


def feed(series: Picked, values: NDArray[np.float64], step: float = 60.0) -> Picked:
    for number, value in enumerate(values.tolist()):
        series.add(value, number * step)
    return series


def test_a_level_is_the_mean_until_weights_fall_off() -> None:
    level = Level()
    for value in (4.0, 8.0, 3.0, 9.0):
        level.add(value, 0.0)
    last, half, fifth, slow = level.ahead(FOUR)[:, 0]
    # By hand: of (4, 8, 3, 9) with weights at least 1/n: 6 after two, then halfway to 3, halfway to 9.
    assert (last, half) == (9.0, 6.75)
    assert fifth == slow == pytest.approx(6.0)  # the plain mean, as four are too few for weights below 1/4
    level.add(math.nan, 0.0)
    assert level.ahead(ONE)[1, 0] == 6.75


def test_holt_winters_is_its_formula() -> None:
    values = [3.0, 5.0, 4.0, 8.0, math.nan, 9.0]
    model = HoltWinters(60.0)
    for number, value in enumerate(values):
        model.add(value, 60.0 * number)
    a, b, f = 0.5, 0.05, 0.97
    level, trend = values[0], 0.0
    for value in values[1:]:
        ahead = level + f * trend
        new = ahead if math.isnan(value) else a * value + (1 - a) * ahead
        trend = f * trend if math.isnan(value) else b * (new - level) + (1 - b) * f * trend
        level = new
    told = model.ahead(FOUR)
    assert told[0, 0] == pytest.approx(level + trend * (f + f**2 + f**3 + f**4))
    assert (told[:3] == told[3:]).all(), "no day was seen yet"


def test_holt_winters_learns_the_day() -> None:
    step = 300.0
    model = HoltWinters(step)
    times = np.arange(0, 3 * DAY, step)
    truth = 10 + 8 * np.sin(2 * np.pi * times / DAY)
    for value, at in zip(truth[:-12].tolist(), times[:-12].tolist(), strict=True):
        model.add(value, at)
    hour_ahead = model.ahead(np.array([12]))[:, 0]
    off = np.abs(hour_ahead - truth[-1])
    assert off[3:].max() < 0.5 and off[3:].max() < off[:3].min()


def test_autoregression_finds_the_weights_of_a_process() -> None:
    model, values = Autoregressive(2), [5.0, 7.0]
    while len(values) < 120:  # swings on and on, without noise: what comes next is known exactly
        values.append(4.0 + 1.6 * values[-1] - 1.0 * values[-2])
    for number, value in enumerate(values[:-4]):
        model.add(value if number % 29 else math.nan, 0.0)
    assert model.ahead(np.array([1, 4]))[0] == pytest.approx([values[-4], values[-1]], rel=0.01)


def test_autoregression_with_nothing_to_fit_says_the_last_value() -> None:
    model = Autoregressive()
    assert np.isnan(model.ahead(ONE)).all()
    for value in (1.0, 2.0, math.nan):
        model.add(value, 0.0)
    assert model.ahead(FOUR).tolist() == [[2.0]]
    for _ in range(400):
        model.add(math.nan, 0.0)
    assert model.ahead(FOUR).tolist() == [[2.0]]


def test_autoregression_does_not_run_away() -> None:
    model = Autoregressive()
    for number in range(60):
        model.add(1.1**number, 0.0)
    assert 0 <= model.ahead(np.array([500]))[0, 0] <= 2 * 1.1**59


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (lambda rng, at: 60 + np.cumsum(rng.normal(0, 1, len(at))), ("constant, 0.05",)),
        (lambda rng, at: 20 + 10 * np.sin(at / 600) + rng.normal(0, 0.2, len(at)), ("constant", "Holt-Winters")),
        (lambda rng, at: 5 + at / 1000 + rng.normal(0, 0.2, len(at)), ("constant",)),
        (lambda rng, at: rng.poisson(600, len(at)) / 60, ("constant, 1", "constant, 0.5", "Holt-Winters, 0.5")),
    ],
    ids=["walk", "wave", "growth", "steady"],
)
def test_who_does_not_fit_is_not_picked(
    made: Callable[[np.random.Generator, NDArray[np.float64]], NDArray[np.float64]], wrong: tuple[str, ...]
) -> None:
    at = np.arange(300) * 60.0
    mean, lower, upper, name = feed(Picked(60.0, 1 / 60), made(np.random.default_rng(1), at)).ahead(300)
    assert not name.startswith(wrong)
    assert lower <= mean <= upper


def test_the_day_is_picked_where_there_is_one() -> None:
    at = np.arange(0, 3 * DAY, 300.0)
    rate = 6 + 5 * np.sin(2 * np.pi * at / DAY)
    values = np.random.default_rng(2).poisson(rate * 300) / 300
    series = feed(Picked(300.0, 1 / 300, longest=3600), values, 300.0)
    assert "with the day" in series.ahead(3600)[3]


@pytest.mark.parametrize("quantile", [0.8, 0.9, 0.95])
def test_the_band_holds_as_often_as_asked_on_what_comes_later(quantile: float) -> None:
    """All sorts of series; each value is compared with what was said five minutes before."""
    held: list[bool] = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        at = np.arange(300) * 60.0
        rate = 5 + 2 * np.sin(at / 2000 * (1 + seed)) + np.cumsum(rng.normal(0, 0.03 * seed, len(at)))
        values = rng.poisson(np.maximum(0.1, rate) * 60) / 60
        series = Picked(60.0, 1 / 60, quantile=quantile)
        for number, value in enumerate(values.tolist()[:-5]):
            series.add(value, number * 60.0)
            if number >= 50:
                held.append(values[number + 5] <= series.ahead(300)[2])
    assert quantile - 0.04 <= np.mean(held) <= min(0.995, quantile + 0.08)


def test_a_burst_does_not_become_what_is_expected() -> None:
    values = np.random.default_rng(3).poisson(300, 200) / 60
    values[-10] = 60.0
    mean, _, upper, _ = feed(Picked(60.0, 1 / 60), values).ahead(300)
    assert 4 < mean < 7 and upper < 15


def test_a_spread_has_bursts_but_not_what_chance_makes_of_a_rate() -> None:
    rng = np.random.default_rng(5)
    chance = rng.poisson(300, 200) / 60
    spread = feed(Picked(60.0, 1 / 60), chance).spread(300)
    assert len(spread) == 8 and np.mean(spread) == pytest.approx(5, rel=0.05)
    assert np.std(spread) < 0.5 * np.std(chance)
    bursts = np.where(rng.random(200) < 0.2, 4, 0.25) * chance
    spread = feed(Picked(60.0, 1 / 60), bursts).spread(300)
    assert min(spread) < 2 and max(spread) > 15


def window(number: int, arrivals: float, prompt: float = NAN, output: float = NAN, cached: float = NAN) -> Window:
    return Window(
        at=30.0 * number,
        seconds=30.0,
        arrivals=arrivals,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
    )


def test_cold_start_says_what_it_saw_with_a_wide_band() -> None:
    picking = Picking()
    assert math.isnan(picking.ahead(60).arrivals.mean)
    picking.add(window(0, 30, 1000, 200, 250))
    told = picking.ahead(60)
    assert (told.at, told.arrivals.mean, told.prompt_tokens.mean, told.cached_share.mean) == (60.0, 1.0, 1000.0, 0.25)
    assert told.arrivals.upper > 1.25 and told.cached_share.upper < 0.25


def test_without_traffic_lengths_stay_as_they_were() -> None:
    """B241: no requests are no requests of length 0."""
    picking = Picking()
    for number in range(40):
        picking.add(window(number, 60, 1000, 200, 500))
    for number in range(40, 400):
        picking.add(window(number, 0, 0.0 if number % 2 else NAN, NAN))
    told = picking.ahead(120)
    assert told.arrivals.mean == pytest.approx(0, abs=1e-6) and told.arrivals.upper < 0.1
    assert told.prompt_tokens.mean == pytest.approx(1000) and told.output_tokens.mean == pytest.approx(200)
    assert told.cached_share.mean == pytest.approx(0.5)


def test_gaps_and_odd_values_change_nothing() -> None:
    """B244: what is no measurement is a gap."""
    rng, whole, holed = np.random.default_rng(4), Picking(), Picking()
    for number in range(200):
        seen = window(number, float(rng.poisson(120)), 1000, 200, 0)
        whole.add(seen)
        if number % 10 == 3:
            continue  # a window that was lost
        odd = {5: NAN, 6: math.inf, 7: -3.0}.get(number % 20)
        holed.add(seen if odd is None else window(number, odd, odd, odd, odd))
    holed.add(Window(at=NAN, seconds=30.0, arrivals=9.0))
    holed.add(Window(at=30.0 * 199, seconds=30.0, arrivals=1e9))  # told twice
    told, wanted = holed.ahead(180), whole.ahead(180)
    assert told.at == wanted.at
    assert told.arrivals.mean == pytest.approx(wanted.arrivals.mean, rel=0.1)
    assert told.arrivals.upper == pytest.approx(wanted.arrivals.upper, rel=0.1)
    assert told.prompt_tokens.mean == pytest.approx(1000)


def test_after_a_long_silence_history_begins_anew() -> None:
    picking = Picking()
    picking.add(window(0, 30, 1000, 200, 0))
    picking.add(window(10_000_000, 60, 500, 100, 0))
    assert picking.ahead(60).arrivals.mean == 2.0
