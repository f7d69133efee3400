"""Coefficients fitted to what became of placements whose truth is known."""

import math

import numpy as np
import pytest

from router.cost import Prediction
from router.fit import Fit, Measured
from router.fleet import TPOT_PRIOR, TTFT_PRIOR, Fleet

TTFT = np.array([0.02, 0.6, 1.5, 2.0, 0.1])
TPOT = np.array([0.015, 3e-4, 5e-8, 0.004])


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.set(fleet.join(name), ready=True, decodes=True)
    return fleet


def placements(count: int, seed: int = 1, noise: float = 0.2) -> list[tuple[Prediction, Measured]]:
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        computing = np.array([1.0, rng.exponential(0.5), rng.exponential(0.3), rng.exponential(0.1), rng.poisson(0.5)])
        decoding = np.array([1.0, rng.integers(1, 60), rng.uniform(0, 200_000), rng.exponential(0.5)])
        factors = rng.uniform(1 - noise, 1 + noise, 2)
        ttft, tpot = TTFT @ computing * factors[0], TPOT @ decoding * factors[1]
        prediction = Prediction(0.1, 0.01, tuple(computing.tolist()), (), tuple(decoding.tolist()))
        made.append((prediction, Measured(float(ttft), 101, float(100 * tpot))))
    return made


def test_coefficients_are_found_in_noise() -> None:
    fleet = fleet_of("a", "b")
    fit = Fit(fleet)
    for prediction, measured in placements(600):
        fit.learn(prediction, measured, computing=0, decode=0)
    errors = []
    for prediction, measured in placements(100, seed=2, noise=0.0):
        assert measured.ttft is not None and measured.tpot is not None
        errors.append(fleet.table["ttft"][0] @ np.array(prediction.computing) / measured.ttft - 1)
        errors.append(fleet.table["tpot"][0] @ np.array(prediction.decoding) / measured.tpot - 1)
    assert np.abs(errors).mean() < 0.06
    assert fleet.table["ttft"][0][1:3] == pytest.approx(TTFT[1:3], rel=0.2)
    assert (fleet.table["ttft"][1] == TTFT_PRIOR).all() and (fleet.table["tpot"][1] == TPOT_PRIOR).all()
    fit.tick(1.0)  # nothing is known of b: it begins with what a has
    assert (fleet.table["ttft"][1] == fleet.table["ttft"][0]).all()


def test_a_worker_that_becomes_slow_is_noticed_soon() -> None:
    fleet = fleet_of("a")
    fit = Fit(fleet)
    made = placements(260, noise=0.05)
    for prediction, measured in made[:200]:
        fit.learn(prediction, measured, computing=0, decode=0)
    for prediction, measured in made[200:]:
        assert measured.ttft is not None
        slow = Measured(4 * measured.ttft, measured.output_tokens, measured.decode_seconds)
        fit.learn(prediction, slow, computing=0, decode=0)
    assert fleet.table["ttft"][0] @ np.ones(5) > 2 * TTFT.sum()


def test_each_of_two_workers_learns_its_part() -> None:
    """Transfers take ten times as long as was believed: the decode worker's fault."""
    fleet = fleet_of("p", "d")
    fit, rng = Fit(fleet), np.random.default_rng(1)
    for _ in range(400):
        own, moved = rng.exponential(0.2), rng.exponential(0.05)
        prediction = Prediction(1.0, 1.0, (1.0, 0.0, own, 0.0, 0.0), (1.0, 0.0, 0.0, moved, 0.0), ())
        fit.learn(prediction, Measured(0.01 + own + 10 * moved, 1, 0.0), computing=0, decode=1)
    assert fleet.table["ttft"][1][3] == pytest.approx(10, rel=0.2)
    assert fleet.table["ttft"][0][2] == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0, 1e9, None])
def test_what_cannot_be_is_refused(seconds: float | None) -> None:
    fleet = fleet_of("a")
    fit = Fit(fleet)
    prediction, _ = placements(1)[0]
    decode_seconds = math.nan if seconds is None else 100 * seconds
    fit.learn(prediction, Measured(seconds, 101, decode_seconds), computing=0, decode=0)
    fit.learn(Prediction(1.0, 1.0, (math.nan,) * 5, (), (math.inf,) * 4), Measured(1.0, 11, 1.0), computing=0, decode=0)
    fit.learn(Prediction(), Measured(1.0, 11, 1.0), computing=0, decode=0)
    fit.learn(prediction, Measured(None, 3, 1.0), computing=0, decode=0)  # too few tokens for a rate
    assert (fleet.table["ttft"][0] == TTFT_PRIOR).all() and (fleet.table["tpot"][0] == TPOT_PRIOR).all()


def test_coefficients_stay_between_bounds_whatever_comes() -> None:
    fleet, rng = fleet_of("a"), np.random.default_rng(1)
    fit = Fit(fleet)
    for number in range(2000):
        features = tuple(float(value) for value in 10.0 ** rng.uniform(-9, 9, 5))
        measured = Measured(float(10.0 ** rng.uniform(-9, 3)), 101, float(10.0 ** rng.uniform(-9, 3)))
        fit.learn(Prediction(1.0, 1.0, features, (), features[:4]), measured, computing=0, decode=0)
        if number % 2:  # one kind of request for long
            fit.learn(Prediction(1.0, 1.0, (1.0,) * 5, (), (1.0,) * 4), measured, computing=0, decode=0)
    for column, prior in (("ttft", TTFT_PRIOR), ("tpot", TPOT_PRIOR)):
        found = fleet.table[column][0]
        assert np.isfinite(found).all() and (found >= 0).all() and (found <= 100 * prior).all()


def test_a_worker_that_left_is_forgotten() -> None:
    fleet = fleet_of("a", "b")
    fit = Fit(fleet)
    for prediction, measured in placements(50):
        fit.learn(prediction, measured, computing=0, decode=0)
    fit.forget(0)
    fleet.leave("a")
    row = fleet.join("c")
    assert row == 0 and (fleet.table["ttft"][row] == TTFT_PRIOR).all()
    fit.tick(1.0)
    assert (fleet.table["ttft"][1] == TTFT_PRIOR).all()


def test_of_workers_that_are_alike_none_is_preferred_but_a_slow_one_is_told_from_them() -> None:
    fleet = fleet_of("a", "b", "c")
    fit = Fit(fleet)
    for second, (prediction, measured) in enumerate(placements(400)):
        assert measured.ttft is not None
        for row in range(3):
            seen = Measured(measured.ttft * (4 if row == 2 else 1 + 0.2 * row), 1, 0.0)
            fit.learn(prediction, seen, computing=row, decode=row)
        fit.tick(float(second))
    own = fleet.table["ttft"][:, 2]
    assert own[1] / own[0] < 1.15 and own[2] / own[0] > 2


def test_a_worker_that_was_slow_gets_another_chance() -> None:
    """It gets no requests as it seems slow, so that nothing else can show that it is not."""
    fleet = fleet_of("a", "b")
    fit = Fit(fleet)
    made = placements(200, noise=0.05)
    for number, (prediction, measured) in enumerate(made):
        assert measured.ttft is not None
        fit.learn(prediction, measured, computing=0, decode=0)
        fit.learn(prediction, Measured(4 * measured.ttft, 1, 0.0), computing=1, decode=1)
        fit.tick(0.1 * number)
    own = fleet.table["ttft"][:, 2]
    assert own[1] / own[0] > 2
    for number, (prediction, measured) in enumerate(made):
        fit.learn(prediction, measured, computing=0, decode=0)
        fit.tick(20 + 0.2 * number)
    assert own[1] / own[0] == pytest.approx(1, rel=0.2)
    for prediction, measured in made[:5]:  # if it is slow, that is soon known again
        assert measured.ttft is not None
        fit.learn(prediction, Measured(4 * measured.ttft, 1, 0.0), computing=1, decode=1)
    assert fleet.table["ttft"][1][1:3].sum() > 1.5 * fleet.table["ttft"][0][1:3].sum()
