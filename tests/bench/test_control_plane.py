"""Gateways and routers with queues: what one core cannot do, and that others share it."""

from dataclasses import replace

import pytest

from bench.control_plane import load, router_seconds, run
from planner.simulator.clock import Clock
from planner.simulator.control_plane import ControlCosts, ControlPlane
from planner.simulator.settings import Settings

FREE = ControlCosts(1, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_core_does_one_thing_after_the_other() -> None:
    clock = Clock()
    plane = ControlPlane(replace(FREE, gateway_request=0.25, router_request=1.0, router_booking=0.5), 2, clock)
    placed: list[tuple[int, float]] = []
    for number in range(3):
        clock.at(0.0, plane.ask, number, lambda number=number: placed.append((number, clock.now)))
    clock.run()
    # Read at 0.25, 0.5, 0.75. The first router has the first and the third, and hears of the second between them.
    assert placed == [(0, 1.25), (1, 1.75), (2, 2.75)]
    assert [router.busy for router in plane.routers] == [2.5, 2.0] and plane.gateways[0].busy == 0.75


def test_tokens_go_through_the_gateway() -> None:
    clock = Clock()
    plane = ControlPlane(replace(FREE, gateway_token=0.01, router_token=0.001), 3, clock)
    assert plane.first_token(0, 42) == 0.01
    clock.run()
    assert plane.gateways[0].busy == pytest.approx(0.42)
    assert clock.now == pytest.approx(0.005 * (1 + 40))  # a pace after the first, then four times ten tokens' time
    plane.kept(100)
    assert [router.busy for router in plane.routers] == [0.1] * 3  # each hears of all


def test_more_routers_help_until_what_all_hear_is_too_much() -> None:
    """200 requests/s of 10 ms are two routers' work: with one, times grow by a second in each."""
    costs = replace(FREE, router_request=0.01)
    trace = load(200.0, 2.0, 600, 10)
    work = trace.own_rate * 0.01
    rows = {routers: run(trace, 8, routers, costs, "prefix") for routers in (1, 3)}
    assert rows[1]["ttft_grows"] == pytest.approx(work - 1, abs=0.15)
    assert rows[1]["router_cores"] == pytest.approx(work)
    assert abs(rows[3]["ttft_grows"]) < 0.05 and rows[3]["router_cores"] == pytest.approx(work / 3, rel=0.02)
    hears = run(trace, 8, 3, replace(costs, router_token=1 / (200 * 512)), "prefix")  # one block each: a core of it
    assert hears["ttft_grows"] > 0.3 and hears["router_cores"] > 1.5


def test_without_costs_nothing_changes() -> None:
    assert Settings().control is None
    row = run(load(50.0, 1.0, 600, 10), 4, 2, FREE, "prefix")
    assert row["ttft_grows"] < 0.05 and row["router_cores"] == row["gateway_cores"] == 0.0


def test_costs_of_a_router_are_those_of_its_code() -> None:
    placed, booked, token = router_seconds(8, 320, 32)
    assert 0 < booked < placed < 0.1 and 0 < token < 1e-4
