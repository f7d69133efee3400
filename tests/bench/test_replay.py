"""The replay harness: nothing is lost, times are those of the formula, and routers know what workers hold."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import planner.simulator.cluster as cluster_module
from bench.errors import BenchError
from bench.replay.report import add_distance, summarise, without_cpu_time
from bench.replay.traces import load_trace
from bench.router_replay import check_fits
from engine.block_pool import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.step import Step
from planner.offer import Offer
from planner.simulator.clock import Clock
from planner.simulator.cluster import ORACLE, Cluster
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE, Job
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from planner.simulator.worker import MockWorker, Told
from router.policies import POLICIES

SMALL = Settings(workers=4, kv_tokens=60 * BLOCK_SIZE, seed=3)
APART = replace(SMALL, prefill_workers=2)


def chain(name: int, blocks: int) -> list[bytes]:
    return [(name << 32 | block).to_bytes(16, "little") for block in range(1, blocks + 1)]


def demand(name: int, prompt: int, output: int) -> Demand:
    return Demand(prompt, output, chain(name, (prompt + output) // BLOCK_SIZE))


def made(demands: list[Demand], gap: float = 0.3) -> Trace:
    return Trace("made", demands, gap * np.arange(len(demands)))


@pytest.fixture(scope="module")
def conversations() -> Trace:
    """Thirteen prefixes in turn, longer each time, more than a small worker can keep."""
    demands = [demand(1 + number % 13, 2000 + 300 * (number // 13), 40 + 37 * (number % 9)) for number in range(240)]
    return made(demands, gap=0.08)


def run(trace: Trace, policy: str = "prefix", settings: Settings = SMALL) -> Cluster:
    cluster = Cluster(trace, trace.own_rate, policy, settings)
    cluster.run()
    return cluster


def summary(cluster: Cluster) -> dict:
    return without_cpu_time(summarise(cluster, ttft=1.0, tpot=0.05))


@pytest.mark.parametrize("settings", [SMALL, APART], ids=["aggregated", "apart"])
@pytest.mark.parametrize("policy", [*POLICIES, ORACLE])
def test_every_request_ends_and_gives_its_blocks_back(conversations, policy, settings) -> None:
    cluster = run(conversations, policy, settings)
    assert cluster.ended == len(cluster.flights) == len(conversations.demands)
    for flight in cluster.flights:
        assert flight.came_at < flight.first_at <= flight.ended_at
        assert flight.cached_tokens < flight.demand.prompt_tokens
    for worker in cluster.workers:
        worker.pool.check()
        counts = worker.pool.counts()
        assert counts["active"] == counts["transfer"] == 0
        assert worker.kept_tokens == 0 and not worker.decoding and not worker.waiting and not worker.prompts
    computed = sum(worker.computed_tokens for worker in cluster.workers)
    asked = sum(flight.demand.prompt_tokens - flight.cached_tokens for flight in cluster.flights)
    assert computed == asked or sum(worker.preempted for worker in cluster.workers) > 0
    for replica in cluster.replicas:
        assert len(replica.placer.reservations) == 0


def test_answers_that_outgrow_the_pool_give_way_and_still_end() -> None:
    trace = made([demand(number, 1000, 9000) for number in range(8)], gap=0.01)
    cluster = run(trace, settings=replace(SMALL, workers=1))
    assert cluster.ended == 8
    assert cluster.workers[0].preempted > 0
    cluster.workers[0].pool.check()


@pytest.mark.parametrize("settings", [SMALL, APART], ids=["aggregated", "apart"])
def test_the_index_is_what_the_workers_hold(conversations, settings) -> None:
    cluster = run(conversations, settings=replace(settings, routers=2))
    for replica in cluster.replicas:
        assert replica.replays == replica.snapshots == 0
        assert_index_is_true(cluster, replica)


def test_lost_events_are_sent_once_more(conversations) -> None:
    cluster = run(conversations, settings=replace(SMALL, routers=2, lost_events=0.1))
    assert cluster.lost > 10
    # Events that come after the last beat are told of by nobody.
    cluster.settings = SMALL
    cluster.beat()
    cluster.clock.run()
    for replica in cluster.replicas:
        assert replica.replays > 10 and not replica.snapshots
        assert_index_is_true(cluster, replica)


def test_what_a_worker_keeps_no_more_comes_as_a_snapshot(conversations, monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "_KEPT", 1)
    cluster = run(conversations, settings=replace(SMALL, lost_events=0.1))
    cluster.settings = SMALL
    cluster.beat()
    cluster.clock.run()
    assert cluster.replicas[0].snapshots > 5
    assert_index_is_true(cluster, cluster.replicas[0])


def assert_index_is_true(cluster: Cluster, replica) -> None:
    for worker in cluster.workers:
        hashes = worker.pool.hashes()
        assert replica.placer.index.num_blocks(worker.number) == len(hashes) > 0
        assert all(worker.number in replica.placer.index.holders(each) for each in hashes)


def test_equal_seeds_give_equal_results(conversations) -> None:
    settings = replace(SMALL, routers=3, lost_events=0.02)
    for policy in ("two_choices", "prefix"):
        assert summary(run(conversations, policy, settings)) == summary(run(conversations, policy, settings))
    other = run(conversations, "two_choices", replace(settings, seed=4))
    assert summary(other) != summary(run(conversations, "two_choices", settings))


def test_the_oracle_finds_at_least_what_round_robin_finds(conversations) -> None:
    for settings in (SMALL, replace(SMALL, fetch_tokens=0), APART):
        oracle, blind = (summary(run(conversations, policy, settings)) for policy in (ORACLE, "round_robin"))
        assert oracle["hit_rate"] - oracle["fetched_rate"] >= blind["hit_rate"] - blind["fetched_rate"]
        assert oracle["ttft_s"]["p50"] <= blind["ttft_s"]["p50"]
    found = {ORACLE: 0.5, "prefix": 0.4}
    results = [{"workers": 4, "rate": 1.0, "policy": policy, "hit_rate": rate} for policy, rate in found.items()]
    add_distance(results)
    assert results[1]["hit_points_to_oracle"] == pytest.approx(-10)


def test_one_request_alone_takes_the_time_of_the_formula() -> None:
    timing, hop = Timing(), SMALL.hop
    cluster = run(made([demand(1, 3000, 700)]), settings=replace(SMALL, workers=1))
    flight = cluster.flights[0]
    prompt = sum(
        max(timing.step, timing.prompt_token * tokens) + timing.prompt_token_context * tokens * (start + tokens / 2)
        for start, tokens in ((0, 1280), (1280, 1280), (2560, 440))
    )
    answer = sum(timing.step + timing.sequence + timing.kept_token * (3000 + done) for done in range(699))
    assert flight.first_at == pytest.approx(2 * hop + prompt)
    assert flight.ended_at - flight.first_at == pytest.approx(answer)


def test_a_prompt_computed_elsewhere_costs_two_hops_and_a_move() -> None:
    settings = replace(SMALL, workers=2, prefill_workers=1)
    flight = run(made([demand(1, 1000, 300)]), settings=settings).flights[0]
    timing = Timing()
    assert flight.first_at == pytest.approx(3 * SMALL.hop + timing.prompt(0, 1000, 1280))
    answer = timing.decodes(299, 1, 1000)
    assert flight.ended_at - flight.first_at == pytest.approx(answer + timing.transfer(1000))


def test_workers_that_prefill_may_be_of_another_kind() -> None:
    """Two GPUs each, with steps of their own and a faster link; those that decode stay as they are."""
    fast = Timing(prompt_step=4e-3, prompt_token=12e-6, prompt_token_context=0.9e-9, link_bytes=200e9)
    offer = Offer(gpus=2, timing=fast, kv_tokens=1_000_000, max_batched_tokens=4096)
    cluster = run(
        made([demand(1, 3000, 300)]), settings=replace(SMALL, workers=2, prefill_workers=1, prefill_offer=offer)
    )
    flight = cluster.flights[0]
    step = 4e-3 + 12e-6 * 3000 + 0.9e-9 * 3000 * 1500  # one, not three of 1,280 tokens
    assert flight.first_at == pytest.approx(3 * SMALL.hop + step)
    answer = Timing().decodes(299, 1, 3000)
    assert flight.ended_at - flight.first_at == pytest.approx(answer + fast.transfer(3000))
    assert [worker.gpus for worker in cluster.members.there()] == [2, 1]
    assert cluster.members.gpu_seconds == pytest.approx(3 * cluster.ended_at)


def test_steps_within_is_the_inverse_of_decodes() -> None:
    timing = Timing()
    for sequences, kept in ((1, 100), (32, 40_000), (256, 500_000)):
        for steps in (1, 2, 17, 900):
            seconds = timing.decodes(steps, sequences, kept)
            assert timing.steps_within(seconds * (1 - 1e-6), sequences, kept) == steps
            assert timing.steps_within(seconds + 1e-4, sequences, kept) == steps + 1


def test_a_prompt_that_comes_waits_for_the_step_under_way_and_no_longer() -> None:
    timing = Timing()
    cluster = run(made([demand(1, 1000, 500), demand(2, 600, 1)], gap=1.0), settings=replace(SMALL, workers=1))
    first, second = cluster.flights
    alone = second.came_at + 2 * SMALL.hop + timing.mixed(600, 600 * 300, 1, 1300)
    assert alone < second.first_at < alone + 2 * timing.decodes(1, 1, 1300)
    assert first.ended_at > second.ended_at


def test_a_mock_worker_takes_the_steps_of_the_engines_own_scheduler() -> None:
    """Sixty requests of six prefixes, some in a crowd: equal reuse, and equal times of first and last tokens."""
    rng = random.Random(5)
    at, asked = 0.0, []
    for number in range(60):
        at += rng.expovariate(3.0)
        asked.append((at, number % 6, rng.randint(300, 9000), rng.randint(1, 400)))
    settings = replace(SMALL, workers=1, kv_tokens=4000 * BLOCK_SIZE, hop=0.0, fetch_tokens=0)
    demands = [
        Demand(prompt, output, chain(name, prompt // BLOCK_SIZE) + chain(100 + number, (prompt + output) // BLOCK_SIZE))
        for number, (_, name, prompt, output) in enumerate(asked)
    ]
    trace = Trace("made", demands, np.array([at for at, *_ in asked]))
    cluster = Cluster(trace, trace.own_rate, "round_robin", settings)
    cluster.run()
    flights = cluster.flights
    assert sum(flight.cached_tokens > 0 for flight in flights) > 20

    engine = EngineScheduler(settings)
    first, last, cached = engine.run(asked)
    for flight in flights:
        assert flight.cached_tokens == cached[flight.number]
        assert flight.first_at == pytest.approx(first[flight.number], abs=1e-6)
        assert flight.ended_at == pytest.approx(last[flight.number], abs=1e-6)


class EngineScheduler:
    """The engine's own scheduler, step by step, on the same clock."""

    def __init__(self, settings: Settings) -> None:
        self.scheduler = Scheduler(
            BlockPool(settings.kv_tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_batched_tokens=settings.max_batched_tokens,
            max_mixed_prefill_tokens=settings.max_batched_tokens,
            max_running=settings.max_running,
            max_model_len=1 << 20,
            max_overtaking=settings.max_overtaking,
        )

    def run(self, asked: list[tuple[float, int, int, int]]) -> tuple[dict, dict, dict]:
        """(time of the first token, of the last one, cached tokens) of each."""
        now, first, last, cached = 0.0, {}, {}, {}
        coming = list(enumerate(asked))
        while coming or self.scheduler.sequences:
            if not self.scheduler.sequences:
                now = max(now, coming[0][1][0])
            while coming and coming[0][1][0] <= now:
                number, (_, name, prompt, output) = coming.pop(0)
                sampling = SamplingParams(max_tokens=output)
                request = Request(request_id=str(number), prompt_token_ids=[name] * prompt, sampling=sampling)
                self.scheduler.add(Sequence(request, number, BLOCK_SIZE, b"root"))
            step = self.scheduler.schedule(0.0)
            now += self.seconds(step)
            sampling = [entry.sequence for entry in step.entries if entry.samples]
            for one in self.scheduler.complete(step, {one.request_id: 10**6 + one.arrival for one in sampling}):
                first.setdefault(one.arrival, now)
                cached[one.arrival] = one.num_cached_tokens
                if one.state is State.FINISHED:
                    last[one.arrival] = now
        return first, last, cached

    def seconds(self, step: Step) -> float:
        chunks = [entry for entry in step.entries if not entry.sequence.num_output_tokens]
        decodes = [entry for entry in step.entries if entry.sequence.num_output_tokens]
        products = sum(entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in chunks)
        kept = sum(entry.start for entry in decodes)
        return Timing().mixed(sum(entry.num_tokens for entry in chunks), products, len(decodes), kept)


def test_short_prompts_pass_long_ones_as_in_the_engine() -> None:
    trace = made([demand(1, 20_000, 1), demand(2, 20_000, 1), demand(3, 600, 1)], gap=0.001)
    settings = replace(SMALL, workers=1, kv_tokens=200 * BLOCK_SIZE)
    first = [flight.first_at for flight in run(trace, settings=settings).flights]
    assert first[2] < first[0] < first[1]


def test_who_finds_no_room_waits_and_nobody_passes() -> None:
    ended: list[int] = []
    reserved: list[int] = []
    clock = Clock()
    told = Told(
        events=lambda *_: None,
        reserved=lambda job: reserved.append(job.arrival),
        first_token=lambda job: None,
        ended=lambda job: ended.append(job.arrival),
    )
    worker = MockWorker(0, "decode", replace(SMALL, kv_tokens=10 * BLOCK_SIZE), clock, told)
    jobs = [Job(number, size, 50, chain(number, 8)) for number, size in enumerate((3000, 3000, 500))]
    for job in jobs:
        worker.reserve(job)
    assert reserved == [0] and worker.waiting_for_blocks == 2
    worker.commit(jobs[0])
    clock.run()
    assert ended == [0] and reserved == [0, 1, 2] and worker.waiting_for_blocks == 0
    assert jobs[1].state is State.RESERVED


@pytest.mark.parametrize("waits", [True, False])
def test_on_a_cpu_a_prompt_gets_its_room_between_two_steps(waits: bool) -> None:
    clock, reserved = Clock(), list[float]()
    told = Told(
        events=lambda *_: None,
        reserved=lambda job: reserved.append(clock.now),
        first_token=lambda job: None,
        ended=lambda job: None,
    )
    timing = Timing(step=0.1, sequence=0.0, kept_token=0.0, reserve_waits=waits)
    worker = MockWorker(0, "decode", replace(SMALL, timing=timing), clock, told)
    runs, comes = (Job(number, 100, 50, chain(number, 8)) for number in range(2))
    worker.reserve(runs)
    worker.commit(runs)
    clock.at(0.33, worker.reserve, comes)
    clock.run()
    assert reserved == [0.0, pytest.approx(0.4 if waits else 0.33)]


def test_a_prefix_is_fetched_from_the_worker_that_has_it() -> None:
    trace = made([demand(1, 5000, 10), demand(1, 5100, 10), demand(1, 5200, 10)], gap=5.0)
    settings = replace(SMALL, workers=3)
    flights = run(trace, "round_robin", settings).flights
    assert len({flight.placement.decode for flight in flights}) == 3
    assert [flight.fetched_tokens for flight in flights[1:]] == [9 * BLOCK_SIZE] * 2
    assert flights[1].first_at - flights[1].came_at < flights[0].first_at - flights[0].came_at
    never = run(trace, "round_robin", replace(settings, fetch_tokens=0))
    assert all(not flight.cached_tokens for flight in never.flights)


def test_routers_that_tell_each_other_spread_a_burst_better() -> None:
    burst = made([demand(number, 2000, 200) for number in range(120)], gap=0.02)
    apart, together = (
        summary(run(burst, "least_outstanding", replace(SMALL, workers=8, routers=4, shared_load=shared)))
        for shared in (False, True)
    )
    assert together["imbalance"]["computed_prompt_tokens"] < apart["imbalance"]["computed_prompt_tokens"]


def test_generated_agents_share_what_they_said_before() -> None:
    trace = load_trace("tool_agent", None, limit=1500, seed=1)
    assert trace.endless_hit_rate > 0.5
    assert np.all(np.diff(trace.times) >= 0)
    again = load_trace("tool_agent", None, limit=1500, seed=1)
    assert again.demands == trace.demands
    assert np.allclose(trace.starts(10.0)[-1], len(trace.times) / 10.0)
    for one in trace.demands:
        assert len(one.hashes) == (one.prompt_tokens + one.output_tokens) // BLOCK_SIZE


def test_a_turn_waits_for_the_answer_before_it(tmp_path: Path) -> None:
    lines = [(0, 1600, 900, [1, 2, 3, 4]), (10, 2600, 5, [1, 2, 3, 5, 6, 7]), (20, 1650, 5, [1, 2, 3, 8])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines))
    trace = load_trace(str(file), None, limit=0, seed=0)
    assert [demand.follows for demand in trace.demands] == [None, 0, None]
    flights = {flight.number: flight for flight in run(trace).flights}
    assert flights[1].came_at > flights[0].ended_at > flights[2].came_at
    assert flights[1].cached_tokens == 3 * BLOCK_SIZE


def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--folder"):
        load_trace("nothing_of_that_name", None, limit=0, seed=0)
    with pytest.raises(BenchError, match="there are tool_agent"):
        load_trace("nothing_of_that_name", str(tmp_path), limit=0, seed=0)
    with pytest.raises(BenchError, match="--kv-tokens"):
        check_fits(made([demand(1, 100_000, 1)]), SMALL)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]}
    trace, found = tmp_path / "few.jsonl", tmp_path / "found.json"
    trace.write_text("".join(json.dumps(line | {"timestamp": 500 * number}) + "\n" for number in range(6)))
    command = ["-m", "bench.router_replay", "--trace", "few", "--folder", str(tmp_path), "--json", str(found)]
    options = ["--workers", "2,3", "--rates", "1", "--policies", "prefix,oracle"]
    done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(found.read_text())
    assert [(one["workers"], one["policy"]) for one in report["replays"]] == [
        (workers, policy) for workers in (2, 3) for policy in ("prefix", "oracle")
    ]
    assert all(math.isclose(one["hit_rate"], 5 * 1024 / 9000) for one in report["replays"])
    assert "| 1 | oracle |" in done.stdout
