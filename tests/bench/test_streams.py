"""Gateways as queues in a simulation: a token waits for what its gateway has to do before it."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.control_plane import load
from planner.simulator.clock import Clock
from planner.simulator.cluster import Cluster, Flight
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import Job
from planner.simulator.settings import Settings
from planner.simulator.streams import Streams, enough_gateways
from planner.simulator.timing import Timing
from planner.simulator.worker import MockWorker, Told

TIMING = Timing(step=0.01, sequence=0.0, kept_token=0.0, gateway_token=2e-3, gateway_request=1e-3, request_token=1e-5)


def decoding(number: int, streams: Streams, clock: Clock, answers: int, tokens: int) -> MockWorker:
    """A worker with so many answers under way, of so many tokens each."""
    told = Told(lambda *_: None, lambda job: None, lambda job: None, lambda job: None, streams.steps)
    worker = MockWorker(number, "decode", Settings(timing=TIMING), clock, told)
    for each in range(answers):
        job = Job(each, 100, tokens, [b"%d" % each])
        worker.reserve(job)
        worker.commit(job)
    return worker


def test_a_token_waits_for_those_of_all_workers_before_it() -> None:
    """Steps of 10 ms that bring three tokens, from two workers, are 12 ms of work: a queue grows by 2 ms in each."""
    clock = Clock()
    streams = Streams(TIMING, 1, clock)
    for number in range(2):
        decoding(number, streams, clock, 3, 101)
    told: list[float] = []
    for step in (1, 11, 51):
        clock.at(0.01 * step + 1e-6, lambda: told.append(streams.free_at(0) - clock.now))
    clock.run()
    # The first answer of each worker begins alone: one token each in the first step, all in those from 0.02 s on.
    assert told == pytest.approx([0.004, 0.012 + 9 * 0.002, 0.012 + 49 * 0.002], abs=1e-5)


def test_two_gateways_share_tokens_and_not_requests() -> None:
    clock = Clock()
    streams = Streams(TIMING, 2, clock)
    decoding(0, streams, clock, 1, 2)
    clock.run()
    assert clock.now == 0.01 and streams.free_at(0) == streams.free_at(1) == pytest.approx(0.011)
    assert streams.read(0, 100) == pytest.approx(0.013) and streams.free_at(1) == pytest.approx(0.011)
    assert streams.token(1) == pytest.approx(0.013) and streams.token(3) == pytest.approx(0.015)


def test_steps_that_are_cut_short_bring_no_more() -> None:
    """Whoever asks in between: tokens are as many as the answers have, but for the first ones. Each is a second."""
    rng, clock = random.Random(4), Clock()
    streams = Streams(msgspec.structs.replace(TIMING, gateway_token=1.0), 1, clock)
    worker = decoding(0, streams, clock, 1, 400)
    for number in range(1, 6):
        job = Job(number, 100, 400, [b"%d" % number])
        clock.at(rng.uniform(0.1, 2.0), lambda job=job: (worker.reserve(job), worker.commit(job)))
        clock.at(rng.uniform(0.1, 3.0), streams.free_at, 0)
    clock.run()
    assert streams.free_at(0) == pytest.approx(0.01 + 6 * 399)


def test_a_worker_that_failed_streams_no_more() -> None:
    """Of an answer that goes on elsewhere each token comes to its gateway once, but for the first after the failure."""
    timing = msgspec.structs.replace(TIMING, gateway_token=1.0)
    load = Trace("made", [Demand(100, 400, [])], np.zeros(1))
    cluster = Cluster(load, load.own_rate, "prefix", Settings(workers=2, timing=timing, gateways=1))
    cluster.clock.at(1.5, lambda: cluster.fail(cluster.flights[0].placement.decode))
    cluster.run()
    assert cluster._streams is not None and cluster.members.failures == 1
    assert cluster._streams.free_at(0) == pytest.approx(400, abs=5)


def flights(timing: Timing, **settings: int) -> list[Flight]:
    cluster = Cluster(load(20.0, 4.0, 600, 40), 20.0, "prefix", replace(Settings(workers=4, timing=timing), **settings))
    cluster.run()
    return cluster.flights


@pytest.mark.parametrize("prefill", [0, 2])
def test_without_these_costs_nothing_changes_and_with_them_all_is_later(prefill: int) -> None:
    plain = Timing(request=0.004)
    free = flights(plain, prefill_workers=prefill)
    assert [each.first_at for each in free] == [
        each.first_at for each in flights(msgspec.structs.replace(plain, gateway_token=0.0), prefill_workers=prefill)
    ]
    costs = msgspec.structs.replace(plain, gateway_token=1e-4, gateway_request=3e-3)
    one, eight = (flights(costs, prefill_workers=prefill, gateways=count) for count in (1, 8))
    ttft = [sum(each.ttft for each in found) / len(found) for found in (free, eight, one)]
    assert ttft == sorted(ttft) and ttft[2] > ttft[0] + 0.5e-3


def test_there_are_gateways_enough_where_nobody_says_how_many() -> None:
    """800 tokens a second of 4 ms are 3.2 gateways' work."""
    costs = Timing(gateway_token=4e-3)
    found = {gateways: [each.ttft for each in flights(costs, gateways=gateways)] for gateways in (0, 1, 5, 6)}
    assert found[0] == found[5] != found[6]
    assert sum(found[1][-5:]) > 20 * sum(found[0][-5:])
    steady, burst = load(20.0, 40.0, 600, 40), load(20.0, 40.0, 600, 40)
    burst.times[-200:] = burst.times[-200] + 1e-3
    assert enough_gateways(steady, steady.own_rate, costs) < 9 < enough_gateways(burst, burst.own_rate, costs)
    steady.times[-1] = 1e15  # nobody counts the windows in which nothing comes
    assert enough_gateways(steady, steady.own_rate, costs) < 9


def test_alone_a_request_is_as_quick_as_its_profile_says() -> None:
    """What a gateway takes is a part of the way to the worker, and not once more."""
    timing = Timing(request=0.01, request_token=1e-5, gateway_request=4e-3, gateway_token=1e-4)
    cluster = Cluster(load(0.02, 100.0, 600, 40), 0.02, "prefix", Settings(workers=1, timing=timing))
    cluster.run()
    way = 2 * cluster.settings.hop + 0.01 + 600 * 1e-5
    assert cluster.flights[0].ttft == pytest.approx(way + timing.prompt(0, 600, 1280) + 1e-4)
