"""The KV service of a simulated cluster: what it keeps, what comes back from where, and what is given up."""

import json
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.errors import BenchError
from bench.replay.simulated import DISK_FLAG, HOST_FLAG, REDIS_FLAG, require_policy, settings_of
from kv_transfer.tiers.policies import POLICIES
from planner.simulator.cluster import ORACLE, Cluster
from planner.simulator.demand import Demand, Trace
from planner.simulator.foresight import OPTIMUM
from planner.simulator.job import BLOCK_SIZE, Job
from planner.simulator.settings import KvSettings, Settings
from planner.simulator.timing import Timing

BLOCKS = 40  # of the only worker's pool
ENDLESS = 10_000 * BLOCK_SIZE
ALONE = Settings(workers=1, kv_tokens=BLOCKS * BLOCK_SIZE, seed=3)
APART = replace(ALONE, workers=4, prefill_workers=2)


def chain(name: int, blocks: int) -> list[bytes]:
    return [(name << 32 | block).to_bytes(16, "little") for block in range(1, blocks + 1)]


def ask(name: int, blocks: int = 12) -> Demand:
    tokens = blocks * BLOCK_SIZE + 100
    return Demand(tokens, 20, chain(name, blocks))


def made(names: list[int], gap: float) -> Trace:
    return Trace("made", [ask(name) for name in names], gap * np.arange(len(names)))


def run(trace: Trace, settings: Settings) -> Cluster:
    cluster = Cluster(trace, trace.own_rate, "prefix", settings)
    cluster.run()
    return cluster


TWICE = made([1, 2, 3, 4, 5, 6] * 2, gap=4.0)  # twice what the worker has room for


def hits(cluster: Cluster) -> list[int]:
    return [flight.cached_tokens // BLOCK_SIZE for flight in sorted(cluster.flights, key=lambda one: one.number)]


def test_only_the_disk_waits_for_a_second_offer() -> None:
    kv = KvSettings(host_tokens=ENDLESS, disk_tokens=ENDLESS, policy="second_hit_lru")
    cluster = run(TWICE, replace(ALONE, kv=kv))
    assert hits(cluster) == [0] * 6 + [12] * 6
    assert cluster.kv is not None and cluster.kv.host.writes > cluster.kv.stores["disk"].kept.writes


def test_what_a_worker_has_forgotten_comes_back_from_host_memory() -> None:
    assert sum(hits(run(TWICE, ALONE))) == 0
    cluster = run(TWICE, replace(ALONE, kv=KvSettings(host_tokens=ENDLESS)))
    assert hits(cluster) == [0] * 6 + [12] * 6
    assert [flight.restored_by for flight in cluster.flights[6:]] == [{"host": 12 * BLOCK_SIZE}] * 6
    first, again = cluster.flights[0], cluster.flights[6]
    assert again.first_at - again.came_at < 0.6 * (first.first_at - first.came_at)
    assert cluster.kv is not None and not +cluster.kv._held


def test_workers_read_the_services_memory_side_by_side() -> None:
    """What one of them restores is not waited for by another."""
    settings = Settings(workers=2, kv_tokens=BLOCKS * BLOCK_SIZE, kv=KvSettings(ENDLESS))
    cluster = Cluster(made([1], gap=1.0), 1.0, "prefix", settings)
    service, hashes = cluster.kv, chain(1, 12)
    assert service is not None
    service._store(hashes)
    for number, worker in enumerate(cluster.workers):
        worker.prefill_rate.add(10_000, 1.0, 0.0)
        job = Job(number, 12 * BLOCK_SIZE + 100, 1, hashes, hold=False)
        cluster.fetches.submit(job, worker, service)
    ends = [worker.restores_free_at for worker in cluster.workers]
    assert ends == [settings.timing.restore(12 * BLOCK_SIZE) - settings.timing.host_latency] * 2


@pytest.mark.parametrize(
    ("kv", "speed", "tier"),
    [
        (KvSettings(24 * BLOCK_SIZE, disk_tokens=ENDLESS), 1e12, "disk"),
        (KvSettings(24 * BLOCK_SIZE, redis_tokens=ENDLESS), 1e12, "redis"),
        (KvSettings(24 * BLOCK_SIZE, disk_tokens=ENDLESS, redis_tokens=ENDLESS), 1e12, "disk"),
        (KvSettings(24 * BLOCK_SIZE, disk_tokens=ENDLESS), 0.1e9, None),
    ],
    ids=["disk", "redis", "disk before redis", "a disk slower than computing"],
)
def test_a_store_beneath_is_read_unless_computing_is_sooner_done(kv, speed, tier) -> None:
    timing = Timing(disk_read_bytes=speed, redis_bytes=speed)
    settings = replace(ALONE, kv=kv, timing=timing)
    cluster, off = run(TWICE, settings), run(TWICE, ALONE)
    found = {name for flight in cluster.flights for name in flight.restored_by}
    assert found - {"host"} == ({tier} if tier else set())
    to_off = [flight.ttft / alone.ttft for flight, alone in zip(cluster.flights[6:], off.flights[6:], strict=True)]
    if tier:
        assert max(to_off) < 0.7
    else:  # it is asked once, and no more once it has shown how slow it is
        assert max(to_off) < 2.2 and sum(each > 1.05 for each in to_off) == 1


def test_a_slow_disk_beneath_takes_nothing_from_host_memory() -> None:
    """Some are asked for again while host memory has them, others when only the disk does."""
    names = [1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 1, 7, 8, 7, 8, 2, 9, 10, 9, 10]
    trace = made(names, gap=4.0)
    kv = KvSettings(26 * BLOCK_SIZE, disk_tokens=ENDLESS)
    settings = replace(ALONE, kv_tokens=14 * BLOCK_SIZE, kv=kv, timing=Timing(disk_read_bytes=0.1e9))
    cluster = run(trace, settings)
    restored = [set(flight.restored_by) for flight in sorted(cluster.flights, key=lambda one: one.number)]
    again = [number for number, name in enumerate(names) if name > 2 and name in names[:number]]
    assert [restored[number] for number in again] == [{"host"}] * len(again)
    assert not any(restored[number] for number in (10, 15))  # of which the disk alone has all


@pytest.mark.parametrize("policy", [*POLICIES, OPTIMUM])
def test_all_that_routers_believe_of_tiers_is_there(policy) -> None:
    rng = random.Random(7)
    trace = made([rng.randint(1, 12) for _ in range(80)], gap=0.4)
    kv = KvSettings(host_tokens=60 * BLOCK_SIZE, disk_tokens=90 * BLOCK_SIZE, policy=policy)
    cluster = run(trace, replace(APART, kv=kv))
    assert cluster.ended == len(trace.demands)
    service, index = cluster.kv, cluster.replicas[0].placer.index
    assert service is not None and len(service.host) <= 60 and len(service.stores["disk"].kept) <= 90
    near = set(service.host.hashes())
    there = near | set(service.stores["disk"].kept.hashes())
    assert service.held().keys() == {"host", "disk"} and set(service.held()["host"]) == near
    for row, held in ((service.number, near), (service.number + 1, there)):
        assert index.num_blocks(row) == len(held)
        assert all(row in index.holders(each) for each in held)
    for worker in cluster.workers:
        worker.pool.check()
        assert not worker.pool.counts()["active"]


def test_the_optimum_keeps_what_will_be_asked_for() -> None:
    names = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]  # in turn: the worst for an LRU
    kv = KvSettings(host_tokens=48 * BLOCK_SIZE)
    lru, best = (
        run(made(names, gap=4.0), replace(ALONE, kv=replace(kv, policy=policy))) for policy in ("lru", OPTIMUM)
    )
    assert sum(hits(best)) > sum(hits(lru))


def test_flags_say_tokens_or_sizes_and_what_is_odd_is_told() -> None:
    def kv(**flags: str) -> KvSettings:
        names = {"host": HOST_FLAG, "disk": DISK_FLAG, "redis": REDIS_FLAG}
        return settings_of(2, 0, 1, None, None, 0, {names[name]: text for name, text in flags.items()}).kv

    assert kv(host="1GiB") == KvSettings(host_tokens=8192)
    assert kv(host="5000", disk="1TB", redis="2GB") == KvSettings(5000, 7_629_394, 15_258)
    for flags, words in (
        ({"disk": "1TB"}, "--kv-disk: what lies there passes through host memory"),
        ({"host": "100"}, "less than a block"),
        ({"host": "much"}, "give tokens, as 2000000, or a size"),
    ):
        with pytest.raises(BenchError, match=words):
            kv(**flags)
    with pytest.raises(BenchError, match="leave --kv-memory-host out"):
        require_policy(ORACLE, {HOST_FLAG: "1GiB", DISK_FLAG: None})


def test_the_command_shows_where_prompts_were_cached(tmp_path: Path) -> None:
    flags = "--workers 2 --rate 1 --workload multi-turn --turns 6 --input-len 3000 --output-len 50 --think 20"
    more = f"--kv-tokens 150000 --num-requests 40 --kv-memory-host 64GiB --json {tmp_path / 'out.json'} --quiet"
    command = [sys.executable, "-m", "services.cli", "simulate", *shlex.split(f"{flags} {more}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens = json.loads((tmp_path / "out.json").read_text())["tokens"]
    assert sum(tokens["cached_by"].values()) == tokens["cached"]
    assert tokens["cached_by"]["host"] > 0
    assert f"host {tokens['cached_by']['host'] / tokens['input']:.1%}" in done.stdout
