"""Decisions are written as lines and read back, values that were not measured too."""

import math

import msgspec

from planner.decision import Action, Decision, Option, Outcome, from_line, latest, to_line
from planner.forecast import Band, Forecast
from planner.window import Window


def test_a_line_reads_back_and_what_was_not_measured_is_still_not() -> None:
    decision = Decision(
        number=7,
        at=100.0,
        window=Window(at=100.0, seconds=30.0, arrivals=0.0, ttft=math.inf),
        forecast=Forecast(arrivals=Band(1.0, 2.0)),
        options=(Option(prefill=1, decode=2, gpus=3, attainment=0.97),),
        actions=(Action(kind="flip", worker="a", before="prefill", role="decode"),),
        reason="more answers than prompts",
    )
    line = to_line(decision)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    read = from_line(line)
    assert read.window.arrivals == 0.0 and math.isnan(read.window.prompt_tokens) and math.isnan(read.window.ttft)
    assert (read.options, read.actions, read.forecast.arrivals) == (
        decision.options,
        decision.actions,
        decision.forecast.arrivals,
    )
    assert str(read.actions[0]) == "flip a from prefill to decode"


def test_the_outcome_replaces_its_decision_and_a_cut_line_is_left_out() -> None:
    first = Decision(number=1, at=1.0, window=Window(at=1.0, seconds=1.0), reason="first")
    second = msgspec.structs.replace(first, number=2, reason="second")
    told = msgspec.structs.replace(first, outcome=Outcome(at=2.0, done=1, failed=("no room",)))
    lines = [to_line(first), to_line(second), to_line(told), to_line(second)[:40]]
    found = latest(lines)
    assert [each.number for each in found] == [1, 2]
    assert found[0].outcome is not None and found[0].outcome.failed == ("no room",)
