"""Workers of two models in one table: what is known of the one says nothing of the other."""

import numpy as np
import pytest

from router.cost import Prediction
from router.fit import Fit, Measured
from router.fleet import TPOT_PRIOR, Fleet
from router.health import Health, Outcome, Report
from router.placer import Placed, Placer
from router.policy import NoWorker
from router.snapshot import Ask

LATE = (20, 8.0)  # prompts, and how many times as long as predicted they took


def join(fleet: Fleet, name: str, **columns: float) -> int:
    """A worker of the model that its name begins with."""
    row = fleet.join(name)
    fleet.set(row, ready=True, decodes=True, aggregated=True, model=fleet.model(name[0]), block_size=16, **columns)
    return row


def place(placer: Placer, model: str, key: str = "x") -> Placed:
    ask = Ask(prompt_tokens=1000, max_tokens=10, model=placer.fleet.model(model))
    return placer.place((key, 0), ask, (), (), now=0.0, lease=10.0)


def test_rates_are_those_of_the_models_own_workers() -> None:
    placer = Placer(policy="prefix", local_prefill_tokens=32, fetch_tokens=0, seed=1)
    fast = {join(placer.fleet, name, prefill_rate=50_000.0, fetch_rate=9e5) for name in ("a0", "a1")}
    slow = join(placer.fleet, "b0", prefill_rate=500.0, fetch_rate=np.nan)
    placed = place(placer, "b")
    assert placed.decision.decode == slow
    assert placed.snapshot.prefill_rate == 500.0 and np.isnan(placed.snapshot.fetch_rates).all()
    assert placed.decision.ttft > 1000 / 500
    other = place(placer, "a", "y")
    assert other.decision.decode in fast and other.snapshot.prefill_rate == 50_000.0
    assert other.decision.ttft < 0.1
    with pytest.raises(NoWorker):
        place(placer, "c")


def test_new_worker_begins_with_what_its_own_model_costs() -> None:
    fleet = Fleet()
    first, new, others = join(fleet, "a0"), join(fleet, "a1"), [join(fleet, f"b{number}") for number in range(3)]
    fit = Fit(fleet)
    prediction = Prediction(0.1, 0.008, (1.0, 0.0, 0.1, 0.0, 0.0), (), (1.0, 1.0, 100.0, 0.0))
    for _ in range(50):
        fit.learn(prediction, Measured(0.1, 101, 4.0), computing=first, decode=first)  # 40 ms a token
    fit.tick(1.0)
    assert fleet.table["tpot"][new][0] == fleet.table["tpot"][first][0] > 3 * TPOT_PRIOR[0]
    assert (fleet.table["tpot"][others] == TPOT_PRIOR).all()


def test_a_model_is_no_outlier_beside_another() -> None:
    fleet = Fleet()
    rows = {name: join(fleet, name) for name in ("a0", "a1", "a2", "a3", "b0", "b1")}
    health = Health(fleet)
    for name, row in rows.items():
        for number in range(LATE[0]):
            late = LATE[1] if name[0] == "b" else 1.0
            health.ended(Report((name, number), row, None, Outcome.OK, answered=True, late=late), 0.0)
    assert health.judge(1.0) == [] and not fleet.table["shut"].any()
    for number in range(LATE[0]):
        health.ended(Report(("again", number), rows["b1"], None, Outcome.OK, answered=True, late=1000.0), 1.0)
    assert health.judge(2.0) == [(rows["b1"], "lateness")]  # beside its own kind it is
