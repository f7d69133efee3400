"""From the workers that there are to those that there should be, and models at the edges of what can be told."""

import msgspec
import pytest

from planner.decision import Option
from planner.fitting import LEAST_STEP, Profile
from planner.offer import Offer
from planner.performance import Load, Performance
from planner.reconcile import reconcile
from planner.simulator.timing import Timing
from planner.sizing import Family, most_goodput
from planner.window import Pools, Role, Worker


def worker(name: str, *, fixed: bool = False) -> Worker:
    role: Role = "prefill" if name.startswith("p") else "decode"
    return Worker(name=name, role=role, fixed=fixed)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_fixed_worker_counts_among_those_that_stay(fixed: bool) -> None:
    workers = (worker("p0", fixed=fixed), worker("p1"), worker("p2"), worker("d0"))
    target = Option(prefill=2, decode=2)
    actions = reconcile(target, Pools(workers=workers), [], [1], flips=1, removals=1, additions=1)
    assert [(action.kind, action.worker) for action in actions] == [("flip", "p2")]


def test_the_search_for_goodput_ends_where_no_rate_holds() -> None:
    deployment = Family(Offer()).of(0, 1)
    asked: list[float] = []

    def never(_: object, rate: float) -> bool:
        asked.append(rate)
        assert len(asked) < 20
        return False

    (found,) = most_goodput([deployment], lambda _: 8.0, never, precision=0.02)
    assert found.rate == 0.0 and min(asked) > 0.001 * 8 / 2


def test_the_shortest_steps_of_a_profile_are_no_division_by_zero() -> None:
    timing = Profile(Timing(step=LEAST_STEP, prompt_token=0.0, sequence=0.0, kept_token=0.0)).timing
    offer = msgspec.structs.replace(Offer(), timing=timing)
    performance = Performance(offer, Load(rate=1.0, prompt_tokens=100, output_tokens=10), 1.0, 0.05, 2)
    for shares in (performance.prefill(), *performance.decode(), *performance.aggregated()):
        assert ((shares >= 0) & (shares <= 1 + 1e-9)).all()
    assert performance.decode()[1][1] > 0.99
