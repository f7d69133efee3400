"""Workers of a simulated cluster that come, flip, leave and fail: no request is lost."""

from dataclasses import replace

import numpy as np
import pytest

from planner.control import Controller, ControlSettings
from planner.decision import Decision
from planner.offer import Offer
from planner.simulator.autopilot import Autopilot
from planner.simulator.cluster import ORACLE, Cluster
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from planner.window import Pools, Window

SLOW = Settings(workers=4, prefill_workers=2, timing=Timing(prompt_token=2e-4, step=2e-2), start_seconds=20.0)


def trace(rates: list[float], seconds: float, prompt: int = 900, output: int = 60) -> Trace:
    """So many requests a second, one rate after another, each for so long."""
    rng, demands, times, now = np.random.default_rng(1), list[Demand](), list[float](), 0.0
    for rate in rates:
        end = now + seconds
        while (now := now + float(rng.exponential(1 / rate))) < end:
            blocks = range((prompt + output) // BLOCK_SIZE)
            demands.append(Demand(prompt, output, [(len(demands) * 64 + each + 1).to_bytes(16) for each in blocks]))
            times.append(now)
        now = end
    return Trace("made", demands, np.array(times) - times[0])


def run(load: Trace, settings: Settings) -> Cluster:
    cluster = Cluster(load, load.own_rate, "prefix", settings)
    cluster.run()
    return cluster


def all_ended(cluster: Cluster) -> bool:
    assert len({flight.number for flight in cluster.flights}) == len(cluster.demands)
    assert not any(worker.decoding or worker.waiting or worker.prompts for worker in cluster.workers)
    assert all(worker.pool.num_free == worker.pool.num_blocks for worker in cluster.workers)
    return all(flight.ended_at >= flight.first_at >= flight.came_at for flight in cluster.flights)


def test_a_worker_that_flips_ends_what_it_has_and_keeps_its_cache() -> None:
    load = trace([8.0], 60.0)
    cluster = Cluster(load, load.own_rate, "prefix", SLOW)
    cluster.clock.at(10.0, cluster.members.flip, 0, "decode")
    cluster.clock.at(30.0, cluster.members.flip, 3, "prefill")
    cluster.run()
    assert all_ended(cluster) and [worker.role for worker in cluster.workers] == [
        "decode",
        "prefill",
        "decode",
        "prefill",
    ]
    assert len(cluster.members.flips) == 2 and max(cluster.members.flips) < 20
    assert {flight.placement.prefill for flight in cluster.flights if flight.came_at > 40} <= {1, 3, None}
    assert cluster.workers[0].pool.hashes()


def test_a_worker_that_leaves_or_comes_costs_its_time_and_loses_nothing() -> None:
    load = trace([8.0], 60.0)
    cluster = Cluster(load, load.own_rate, "prefix", replace(SLOW, slots=5))
    cluster.clock.at(10.0, cluster.members.remove, 3)
    cluster.clock.at(30.0, cluster.members.add, "decode")
    cluster.run()
    assert all_ended(cluster)
    late = {flight.placement.decode for flight in cluster.flights if flight.came_at > 52}
    early = {flight.placement.decode for flight in cluster.flights if 20 < flight.came_at < 50}
    assert 3 in late and 3 not in early  # the slot's next worker, after its start
    assert 4 * cluster.clock.now - 25 < cluster.members.gpu_seconds < 4 * cluster.clock.now - 10


def test_what_a_failed_worker_had_is_placed_again_and_goes_on() -> None:
    cluster = run(trace([6.0], 300.0), replace(SLOW, failures=40.0))
    assert cluster.members.failures > 3 and all_ended(cluster)
    again = [flight for flight in cluster.flights if flight.known]
    assert again and all(flight.answer is None or flight.known < flight.demand.output_tokens for flight in again)


def test_with_no_worker_requests_wait_until_one_is_there() -> None:
    load = trace([2.0], 30.0)
    cluster = Cluster(load, load.own_rate, "prefix", replace(SLOW, workers=1, prefill_workers=0))
    cluster.clock.at(5.0, cluster.fail, 0)
    cluster.run()
    waited = [flight for flight in cluster.flights if 6 < flight.came_at < 20]
    assert all_ended(cluster) and all(flight.first_at >= 25 for flight in waited)


class Watch:
    """A planner that does nothing but look."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def decide(self, window: Window, pools: Pools, now: float) -> Decision:
        self.windows.append(window)
        return Decision(number=0, at=now, mode="act", window=window, have={}, reason="")


def watched(load: Trace, settings: Settings, interval: float) -> tuple[Cluster, list[Window]]:
    cluster, watch = Cluster(load, load.own_rate, "prefix", settings), Watch()
    Autopilot(cluster, watch, interval=interval, gpus=4, ttft=2.0, tpot=0.05)
    cluster.run()
    return cluster, watch.windows


def test_a_window_is_made_of_what_came_then() -> None:
    """A long conversation's later question comes after short ones that stand behind it in the trace."""
    hashes = [block.to_bytes(16) for block in range(5010 // BLOCK_SIZE)]
    turns = [Demand(100, 10, []), Demand(5000, 10, hashes, follows=0, think=25.0)]
    later = [Demand(100 + number, 10, []) for number in range(3)]
    load = Trace("made", [*turns, *later], np.array([0.0, 0.0, 1.0, 2.0, 45.0]))
    cluster, windows = watched(load, replace(SLOW, workers=2, prefill_workers=0), 10.0)
    by_window = [[one.demand.prompt_tokens for one in cluster.flights if one.came_at // 10 == at] for at in range(4)]
    assert by_window == [[100, 100, 101], [], [5000], []]
    assert [window.arrivals for window in windows[:4]] == [3, 0, 1, 0]
    assert [window.prompt_tokens for window in windows[:3:2]] == [pytest.approx(301 / 3), 5000]


@pytest.mark.parametrize("interval", [1.0, 300.0])
def test_hours_of_workers_end_with_the_last_request(interval: float) -> None:
    """However late the planner would look again, a worker that was added last is ready, or another fails."""
    load = trace([4.0], 20.0)
    cluster, windows = watched(load, replace(SLOW, slots=5, start_seconds=1000.0, failures=1e-3), interval)
    last = max(flight.ended_at for flight in cluster.flights)
    assert cluster.members.gpu_seconds == pytest.approx(4 * last, rel=1e-3)
    assert cluster.ended_at == pytest.approx(last, abs=0.01)
    assert all(window.at <= last + 0.01 for window in windows)
    cluster = Cluster(load, load.own_rate, "prefix", replace(SLOW, slots=5, start_seconds=1000.0))
    cluster.clock.at(10.0, cluster.members.add, "decode")
    cluster.run()
    assert cluster.members.gpu_seconds == pytest.approx(5 * cluster.ended_at - 10, rel=1e-3)


@pytest.mark.parametrize("more", [{"slots": 5}, {"failures": 1.0}])
def test_the_oracle_knows_no_workers_that_come_or_fail(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="none can come, leave or fail"):
        Cluster(trace([1.0], 5.0), 1.0, ORACLE, replace(SLOW, **more))


def planned(load: Trace, settings: Settings, **more: float) -> tuple[Cluster, Autopilot]:
    cluster = Cluster(load, load.own_rate, "prefix", settings)
    offer = Offer(timing=settings.timing)
    control = ControlSettings(
        mode="act",
        ttft=2.0,
        tpot=0.05,
        offers=(offer,),
        start_seconds=settings.start_seconds,
        shrink_cool_down=120.0,
        **more,  # type: ignore[arg-type]
    )
    pilot = Autopilot(cluster, Controller(control), interval=30.0, gpus=settings.slots, ttft=2.0, tpot=0.05)
    cluster.run()
    return cluster, pilot


def test_constant_load_for_an_hour_is_served_without_oscillation() -> None:
    cluster, pilot = planned(trace([1.0], 3600.0, output=20), replace(SLOW, workers=2, prefill_workers=1, slots=6))
    assert all_ended(cluster)
    settled = [action for decision in pilot.decisions[40:] for action in decision.actions]
    assert not settled
