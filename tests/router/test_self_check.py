"""Predicted against actual reuse, and what placements go by."""

import math

import pytest

from router.self_check import Mode, ReuseCheck, is_alarm, judge


def checked(count: int, predicted: int, found: int) -> ReuseCheck:
    check = ReuseCheck()
    for _ in range(count):
        check.observe(predicted, found, 0.0)
    return check


def test_precision_and_recall_count_tokens() -> None:
    check = ReuseCheck()
    assert math.isnan(check.precision) and math.isnan(check.recall)
    check.observe(100, 50, 0.0)
    check.observe(0, 150, 0.0)
    check.observe(100, 100, 0.0)
    assert (check.precision, check.recall) == (0.75, 0.5)


def test_the_latest_requests_count_most() -> None:
    check = checked(100, 100, 0)
    for second in range(120):
        check.observe(100, 100, float(second))
    assert check.precision > 0.8
    check.tick(10_000.0)
    assert check.requests < 1


@pytest.mark.parametrize("policy", ["prefix", "overlap"])
def test_without_events_load_decides_and_that_is_an_alarm(policy: str) -> None:
    mode, why = judge(policy, workers=3, followed=0, check=ReuseCheck())
    assert mode is Mode.LOAD_ONLY and "3 workers" in why and is_alarm(policy, mode)
    assert judge(policy, workers=3, followed=1, check=ReuseCheck()) == (Mode.PREFIX, "")
    assert judge(policy, workers=0, followed=0, check=ReuseCheck()) == (Mode.PREFIX, "")


def test_predictions_that_do_not_hold_are_an_alarm_once_there_are_enough() -> None:
    assert judge("prefix", 1, 1, checked(19, 100, 0))[0] is Mode.PREFIX
    mode, why = judge("history", 1, 0, checked(20, 100, 49))
    assert mode is Mode.LOAD_ONLY and "49 %" in why and is_alarm("history", mode)
    assert judge("prefix", 1, 1, checked(100, 100, 50))[0] is Mode.PREFIX
    assert judge("prefix", 1, 1, checked(100, 0, 0))[0] is Mode.PREFIX  # nothing was predicted
    assert judge("prefix", 1, 1, checked(100, 10, 1000))[0] is Mode.PREFIX  # too little was, and that held


def test_policies_of_load_are_no_alarm() -> None:
    mode, why = judge("round_robin", workers=3, followed=3, check=ReuseCheck())
    assert mode is Mode.LOAD_ONLY and "round_robin" in why and not is_alarm("round_robin", mode)
