"""What is believed of fetches after some that came and some that did not."""

import pytest

from engine.engine import StepOutput
from engine.request import HOST, Request, SamplingParams
from engine.sequence import Sequence
from engine.step import Entry, Step
from services.worker.prefix_costs import Fetched, PrefixCosts


def test_one_late_fetch_says_nothing_of_other_sources() -> None:
    source = Fetched()
    source.late(1.0)
    assert source.per_second is None
    source.came(1000, 0.5)
    source.late(1.0)
    assert source.per_second == 2000


def test_late_ones_in_a_row_do() -> None:
    source = Fetched()
    source.late(1.0)
    source.late(1.0)
    assert source.per_second == 0
    source.came(1000, 0.5)
    assert 0 < (source.per_second or 0) < 2000


def test_late_ones_in_a_row_do_after_many_that_were_quick() -> None:
    costs = PrefixCosts()
    for _ in range(100):
        costs.fetched(HOST).came(10_000, 0.1)
    costs.fetched(HOST).late(1.0)
    assert costs.restoring_pays(1000)
    costs.fetched(HOST).late(1.0)
    assert not costs.restoring_pays(1000)


def test_fetches_that_had_no_time_do_not_slow_down_long_ones() -> None:
    source = Fetched()
    source.came(8000, 0.1)
    for _ in range(8):
        source.late(0.01)
    assert source.per_second == 80_000


def test_the_kv_service_is_measured_apart() -> None:
    costs = PrefixCosts()
    assert costs.restoring_pays(100)  # it is tried
    costs.fetched("").came(1000, 10.0)
    assert costs.restoring_pays(100) and costs.fetched(HOST).per_second is None
    costs.fetched(HOST).came(1000, 10.0)
    assert not costs.restoring_pays(100)
    costs.fetched(HOST).came(100_000, 0.1)
    assert costs.restoring_pays(100) and costs.fetched("").per_second == 100


def test_a_slow_tier_says_nothing_of_a_nearer_one() -> None:
    costs = PrefixCosts()
    costs.fetched(HOST).came(1000, 0.1)
    for _ in range(2):
        costs.fetched("redis").late(1.0)
    assert costs.fetched("redis").per_second == 0 and costs.fetched("disk").per_second is None
    assert costs.fetched(HOST).per_second == 10_000 and costs.restoring_pays(100)


def test_another_kv_service_is_tried_at_once() -> None:
    costs = PrefixCosts()
    for _ in range(2):
        costs.fetched(HOST).late(1.0)
    assert not costs.restoring_pays(100)
    costs.another_service()
    assert costs.restoring_pays(100)


def test_few_tokens_are_computed_before_a_fetch_has_waited_for_its_steps() -> None:
    costs = PrefixCosts()
    costs.computed(step_of(500, 0.5))
    assert not costs.restoring_pays(900) and costs.restoring_pays(1100)
    assert costs.computing_seconds(100) == pytest.approx(0.1 + 0.5 + 0.02)


def step_of(tokens: int, seconds: float) -> StepOutput:
    sequence = Sequence(Request(request_id="r", prompt_token_ids=[1] * tokens, sampling=SamplingParams()), 0, 16, b"")
    return StepOutput([], [], Step([Entry(sequence, 0, tokens)]), seconds)
