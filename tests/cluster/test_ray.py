"""`tandem up --on ray` on a Ray cluster of three nodes: one is lost under load, and what cannot run says why."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from cluster.harness import Cluster, free_port, start_cluster, stop_cluster
from cluster.ray_nodes import RayNodes, ray_nodes
from cluster.streams import body, run_streams
from cluster.tiny import tiny_model
from faults_hit import must_hit

from services.embedded_state import EmbeddedState
from services.planner.wanted import Wanted
from services.ray_plan import RayPlan, RayWorkerPlan
from services.rpc import cluster_pb2
from services.running import find, members_of

OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")
STREAMS, TOKENS = 4, 150
PATIENT = {"TANDEM_WORKER_WAIT": "60"}  # on a busy machine all workers may miss their leases at once


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(3, free_port()) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("ray") / "tiny")


def workers(cluster: Cluster) -> dict[str, cluster_pb2.Member]:
    """By name; of those that have one name the one that started last is not told from others."""
    members = asyncio.run(members_of(find(cluster.url), "prefill", "decode", "aggregated"))
    return {member.name: member for member in members}


def wait_replaced(
    cluster: Cluster, before: dict[str, cluster_pb2.Member], killed: dict[str, float], timeout: float
) -> dict[str, float]:
    """Waits until other processes have the names of those killed; how many seconds each took from then on."""
    began, took = time.monotonic(), dict[str, float]()
    while len(took) < len(killed):
        for name, member in workers(cluster).items():
            if name in killed and name not in took and member.incarnation != before[name].incarnation:
                took[name] = time.monotonic() - killed[name]
        assert time.monotonic() - began < timeout, f"only {took} are back; log:\n{cluster.log.read_text()[-4000:]}"
        time.sleep(0.1)
    return took


@pytest.mark.timeout(600)  # on a busy machine Ray and the workers take minutes
def test_a_node_is_lost_under_load(nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    options = ("--on", "ray", "--prefill", "1", "--decode", "2", "--local-prefill-tokens", "0", *OPTIONS)
    began = time.monotonic()
    cluster = start_cluster(tmp_path, *options, model=str(model), env=PATIENT)
    try:
        print(f"ready after {time.monotonic() - began:.1f} s")
        before = workers(cluster)
        places = {name: nodes.of(member.pid) for name, member in before.items()}
        assert sorted(before) == ["decode-0", "decode-1", "prefill-0"]
        assert set(places.values()) == set(nodes.raylets), "they are not spread over all nodes"
        assert set(cluster.pids) == {"router", "gateway", "ray"}
        expected = asyncio.run(run_streams(cluster, range(STREAMS), TOKENS))
        assert [stream.error for stream in expected] == [None] * STREAMS

        victim = next(name for name, place in places.items() if name != "prefill-0" and place != nodes.head)
        killed: dict[str, float] = {}

        def kill_node() -> None:
            killed[victim] = time.monotonic()
            nodes.kill(places[victim])

        streams = asyncio.run(run_streams(cluster, range(STREAMS), TOKENS, kill_node))
        print(f"{victim}'s node killed: longest gap {max(stream.gap for stream in streams):.2f} s")
        assert [stream.error for stream in streams] == [None] * STREAMS
        assert [stream.tokens for stream in streams] == [stream.tokens for stream in expected]

        os.kill(before["prefill-0"].pid, signal.SIGKILL)  # a worker alone, too
        killed["prefill-0"] = time.monotonic()
        took = wait_replaced(cluster, before, killed, 180)
        print(f"back after {', '.join(f'{name} {seconds:.1f} s' for name, seconds in took.items())}")
        after = workers(cluster)
        assert nodes.of(after[victim].pid) in nodes.raylets
        assert nodes.of(after["prefill-0"].pid) in nodes.raylets

        again = asyncio.run(run_streams(cluster, range(STREAMS), 20))
        assert [stream.error for stream in again] == [None] * STREAMS
        assert [stream.tokens for stream in again] == [stream.tokens[:20] for stream in expected]
        deadline, unasked = time.monotonic() + 120, itertools.count(100, 8)
        while not cluster.metric("tandem_kv_transfers_total", outcome="committed", worker=victim):
            assert time.monotonic() < deadline, "the worker that came back takes no part"
            first = next(unasked)  # what was asked before goes where it is cached
            others = asyncio.run(run_streams(cluster, range(first, first + 8), 20))
            assert [stream.error for stream in others] == [None] * 8
        cluster.wait_idle()
    finally:
        pids = [member.pid for member in workers(cluster).values()]
        stop_cluster(cluster)
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"workers are left: {left}"
        time.sleep(0.1)


def test_through_the_client(nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    """Of the machine that `tandem up` runs on Ray knows nothing."""
    options = ("--on", nodes.client_address, "--aggregated", "1", "--ray-strategy", "pack", *OPTIONS)
    cluster = start_cluster(tmp_path, *options, model=str(model), env={"RAY_ADDRESS": ""})
    try:
        answer = httpx.post(cluster.url + "/v1/completions", json=body(cluster.model, 1, 5) | {"stream": False})
        assert answer.status_code == 200, answer.text
        assert nodes.of(workers(cluster)["aggregated-0"].pid) in nodes.raylets
    finally:
        stop_cluster(cluster)


@pytest.mark.timeout(600)
def test_the_planner_adds_and_ends_workers(nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    options = ("--on", "ray", "--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", *OPTIONS)
    settings = PATIENT | {
        "TANDEM_PLANNER_INTERVAL": "1",
        "TANDEM_PLANNER_MINIMUM": "prefill=1,decode=2",
        "TANDEM_PLANNER_WORKERS": "3",
        "TANDEM_PLANNER_ROLES": "prefill,decode",
    }
    cluster = start_cluster(tmp_path, *options, "--planner", "act", model=str(model), env=settings)
    try:
        wait(lambda: "decode-1" in workers(cluster))  # as there are to be two
        assert nodes.of(workers(cluster)["decode-1"].pid) in nodes.raylets
        expected = asyncio.run(run_streams(cluster, range(STREAMS), TOKENS))
        assert [stream.error for stream in expected] == [None] * STREAMS
        must_hit(cluster.metric("tandem_kv_transfers_total", outcome="committed", worker="decode-1"), "it had nothing")

        for name in ("decode-1", "decode-0"):  # what came later has its place alone, what was there at first shares one
            before = workers(cluster)
            ended = asyncio.run(
                run_streams(cluster, range(STREAMS), TOKENS, lambda name=name: wish_away(cluster, name))
            )
            assert [stream.error for stream in ended] == [None] * STREAMS
            assert [stream.tokens for stream in ended] == [stream.tokens for stream in expected]
            wait(lambda before=before, name=name: not Path(f"/proc/{before[name].pid}").exists())
            wait(lambda: {"prefill-0", "decode-0", "decode-1"} == set(workers(cluster)))  # one is too few
            assert workers(cluster)[name].incarnation != before[name].incarnation
        assert cluster.metric("tandem_planner_actions_total", kind="add", outcome="done") == 3
    finally:
        pids = [member.pid for member in workers(cluster).values()]
        stop_cluster(cluster)
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def wait(is_so: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wish_away(cluster: Cluster, name: str) -> None:
    """As the planner does."""

    async def end() -> None:
        running = find(cluster.url)
        wanted = Wanted(running.state, running.cluster)
        await wanted.end(name, cluster.model, "decode")
        await wanted.close()

    asyncio.run(end())


def test_what_does_not_fit_is_told_at_once(nodes: RayNodes, model: Path) -> None:
    options = [
        "--on",
        "ray",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--model",
        str(model),
        "--decode-setting",
        "threads=9",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "up", *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "decode-0 needs 9 CPU of one node" in done.stderr
    assert f"{len(nodes.raylets)} nodes with 2 CPU; 2 CPU" in done.stderr


def test_a_node_without_the_model(nodes: RayNodes, tmp_path: Path) -> None:
    plan = RayPlan("", "pack", [RayWorkerPlan("decode-0", "decode", str(tmp_path / "none"), {})])
    command = [sys.executable, "-m", "services.ray_launcher", msgspec.json.encode(plan).decode()]
    with_state = EmbeddedState()
    try:
        environment = os.environ | {"TANDEM_STATE": with_state.url}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    finally:
        with_state.close()
    assert done.returncode == 78
    assert "none': name a Hugging Face folder" in done.stdout
    assert "by the same name on all nodes" in done.stdout
