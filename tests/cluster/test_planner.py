"""The planner of a running cluster: it adds and flips, holds where it knows nothing, and goes on after faults."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from cluster.clients import Clients, ask
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import kill
from cluster.tiny import tiny_model
from prometheus_client import CollectorRegistry, Counter

from bench.profile import card_of, members_at
from planner.window import Role
from services.cluster_state import ClusterState
from services.planner.wanted import Wanted
from services.process import new_incarnation
from services.rpc import cluster_pb2
from services.rpc_server import RpcServer
from services.running import RunningCluster, find
from services.security import ClusterKey

SETTINGS = {
    "TANDEM_PLANNER_INTERVAL": "0.5",
    "TANDEM_PLANNER_START": "0.5",  # less than it takes
    "TANDEM_PLANNER_MINIMUM": "prefill=1,decode=2",
    "TANDEM_PLANNER_WORKERS": "3",
    "TANDEM_PLANNER_ROLES": "prefill,decode",
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with a tiny model, and a planner who is to have two decode workers at least."""
    folder = tmp_path_factory.mktemp("planner")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--planner", "act")
    running = start_cluster(folder, "--prefill", "1", "--decode", "1", *options, model=model, env=SETTINGS)
    yield running
    stop_cluster(running)


def workers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Those that are there, by name."""
    status = httpx.get(cluster.admin + "/admin/status", timeout=30).json()
    return {member["name"]: member for member in status["members"] if member["running"] is not None}


def decisions(cluster: Cluster, last: int = 1) -> list[dict[str, Any]]:
    (found,) = httpx.get(f"{cluster.admin}/admin/planner?last={last}", timeout=30).json().values()
    return list(found)


def wait(is_so: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def numbers(cluster: Cluster) -> tuple[int, int]:
    """Ready prefill and decode workers."""
    ready = [worker["role"] for worker in workers(cluster).values() if worker["state"] == "ready"]
    return ready.count("prefill"), ready.count("decode")


def test_a_planner_killed_in_mid_action_is_followed_by_one_that_goes_on(planned: Cluster) -> None:
    if "decode-1" in planned.pids:  # a try before this one
        asyncio.run(_end(planned, "decode-1", "decode"))
    event = planned.wait_event("started", 120)  # not before the planner has asked for it
    assert event["name"] == "decode-1"
    planned.pids["decode-1"] = int(str(event["pid"]))
    kill(planned, "planner")  # the worker that it has asked for still loads
    wait(lambda: numbers(planned) == (1, 2))
    before = decisions(planned)[0]["number"]
    wait(lambda: decisions(planned)[0]["number"] > before + 3)  # numbers go on, and nothing is added twice
    assert set(workers(planned)) == {"prefill-0", "decode-0", "decode-1"}
    assert planned.metric("tandem_planner_replicas", role="decode", kind="actual") == 2


def test_a_worker_that_ends_is_replaced_and_no_request_fails(planned: Cluster) -> None:
    wait(lambda: numbers(planned) == (1, 2))
    old = workers(planned)["decode-1"]["incarnation"]
    with Clients(planned) as clients:
        clients.wait(4)
        asyncio.run(_end(planned, "decode-1", "decode"))
        wait(lambda: workers(planned).get("decode-1", {"incarnation": old})["incarnation"] != old)
        clients.wait(4)
    assert set(clients.statuses) == {200}
    wait(lambda: numbers(planned)[1] >= 1)


def test_what_it_does_not_know_changes_nothing(planned: Cluster) -> None:
    wait(lambda: numbers(planned) == (1, 2))
    os.kill(planned.pids["router"], signal.SIGSTOP)  # it does not say what waits
    try:
        wait(lambda: decisions(planned)[0]["window"]["queued"] is None)
    finally:
        os.kill(planned.pids["router"], signal.SIGCONT)
    before = decisions(planned)[0]["number"]
    os.kill(planned.pids["gateway"], signal.SIGSTOP)
    time.sleep(4)  # windows without the gateway's word, and then without a gateway
    os.kill(planned.pids["gateway"], signal.SIGCONT)
    wait(lambda: decisions(planned)[0]["number"] > before)
    blind = [each for each in decisions(planned, 30) if each["number"] > before and each["window"]["arrivals"] is None]
    assert blind and all(each["actions"] == [] and each["held"] for each in blind)
    wait(lambda: numbers(planned) == (1, 2))


async def test_numbers_that_cannot_be_change_nothing(planned: Cluster) -> None:
    """A gateway that counts NaN."""
    await asyncio.to_thread(wait, lambda: numbers(planned) == (1, 2))
    registry = CollectorRegistry()
    Counter("tandem_choices", "", ["model"], registry=registry).labels(planned.model).inc(math.nan)
    running = find(planned.url)
    rpc = RpcServer("127.0.0.1", 0, ClusterKey(running.cluster_key, None), registry)
    state = ClusterState(running.state, running.cluster)
    await state.connect()
    await rpc.start()
    member = cluster_pb2.Member(name="odd", role="gateway", incarnation=new_incarnation(), grpc_address=rpc.address)
    await state.register(member)
    try:
        before = (await asyncio.to_thread(decisions, planned))[0]["number"]
        await asyncio.to_thread(wait, lambda: decisions(planned)[0]["number"] > before + 4)
        latest = await asyncio.to_thread(decisions, planned, 3)
        assert all(each["window"]["arrivals"] is None and not each["actions"] and each["held"] for each in latest)
        await asyncio.to_thread(wait, lambda: numbers(planned) == (1, 2))
    finally:
        await state.close()
        await rpc.stop()
    await asyncio.to_thread(wait, lambda: decisions(planned)[0]["window"]["arrivals"] is not None)


async def test_what_an_actuator_could_not_do_is_done_later_and_nothing_twice(planned: Cluster, tmp_path: Path) -> None:
    """Of two workers that are to come the second is refused: by an API server, for a planner that takes over."""
    pytest.importorskip("lightkube", reason="no client: pip install 'tandem-serve[k8s]'")
    from fake_kubernetes import fake_kubernetes

    await asyncio.to_thread(wait, lambda: numbers(planned) == (1, 2))
    running = find(planned.url)
    os.kill(planned.pids["planner"], signal.SIGSTOP)
    another = None
    try:
        async with fake_kubernetes() as server:
            (tmp_path / "kubeconfig").write_text(server.kubeconfig())
            url = f"{server.url}/apis/apps/v1/namespaces/llm/deployments"
            async with httpx.AsyncClient() as http:
                for role, replicas in (("prefill", 1), ("decode", 2)):
                    body = {
                        "apiVersion": "apps/v1",
                        "kind": "Deployment",
                        "metadata": {"name": role, "namespace": "llm"},
                        "spec": {"replicas": replicas},
                    }
                    (await http.post(url, json=body)).raise_for_status()

            def replicas() -> tuple[int, int]:
                found = server.existing()
                return tuple(found["Deployment", role]["spec"]["replicas"] for role in ("prefill", "decode"))

            server.forbidden = "decode"
            own = {
                "TANDEM_PLANNER": "act",
                "TANDEM_PLANNER_ACTUATOR": "kubernetes",
                "TANDEM_PLANNER_DEPLOYMENTS": "prefill=prefill,decode=decode",
                "TANDEM_PLANNER_MINIMUM": "prefill=2,decode=3",
                "TANDEM_PLANNER_WORKERS": "8",
                "TANDEM_NAME": "another",
                "OMP_NUM_THREADS": "1",
                "KUBECONFIG": str(tmp_path / "kubeconfig"),
            }
            _drop_lease(running, planned.model)
            command = [sys.executable, "-m", "services.cli", "serve", "planner"]
            another = subprocess.Popen(command, env=os.environ | SETTINGS | _member(running) | own)

            def outcome() -> dict[str, Any]:
                found = [each["outcome"] for each in decisions(planned, 50) if each["outcome"]]
                return found[-1] if found else {}

            def refused() -> bool:
                return any("another" in each or "refuses" in each for each in outcome().get("failed", []))

            await asyncio.to_thread(wait, refused)
            assert replicas() == (2, 2)
            before = (await asyncio.to_thread(decisions, planned))[0]["number"]
            await asyncio.to_thread(wait, lambda: decisions(planned)[0]["number"] > before + 2)
            assert replicas() == (2, 2)  # what was done is not done again, though no such worker is there yet
            server.forbidden = ""
            await asyncio.to_thread(wait, lambda: replicas() == (2, 3))
            before = (await asyncio.to_thread(decisions, planned))[0]["number"]
            await asyncio.to_thread(wait, lambda: decisions(planned)[0]["number"] > before + 2)
            assert replicas() == (2, 3) and outcome()["failed"] == []
            await asyncio.to_thread(wait, lambda: numbers(planned) == (1, 2))
    finally:
        if another is not None:
            another.kill()
            another.wait()
        _drop_lease(running, planned.model)
        os.kill(planned.pids["planner"], signal.SIGCONT)
    before = (await asyncio.to_thread(decisions, planned))[0]["number"]
    await asyncio.to_thread(wait, lambda: decisions(planned)[0]["number"] > before)


def test_workers_tell_what_a_profile_says_of_their_card(planned: Cluster) -> None:
    room = min(each["kv_tokens"] for each in workers(planned).values())
    told = card_of(members_at(planned.admin, ""), planned.model)
    assert told == {"gpu": "", "gpus": 1, "kv_tokens": room} and room > 0


def test_without_the_cluster_state_it_holds_and_then_goes_on(planned: Cluster) -> None:
    wait(lambda: numbers(planned) == (1, 2))
    held = planned.metric("tandem_planner_held_total", why="cluster_state")
    before = decisions(planned)[0]["number"]
    (server,) = _state_servers(planned.process.pid)
    os.kill(server, signal.SIGSTOP)
    try:
        wait(lambda: planned.metric("tandem_planner_held_total", why="cluster_state") > held + 1)
    finally:
        os.kill(server, signal.SIGCONT)
    wait(lambda: decisions(planned)[0]["number"] > before + 1)
    wait(lambda: numbers(planned) == (1, 2))


def test_b249_a_second_planner_with_other_settings_is_refused(planned: Cluster) -> None:
    running = find(planned.url)
    command = [sys.executable, "-m", "services.cli", "serve", "planner", "--name", "another", "--planner-tpot", "0.2"]
    second = subprocess.run(
        command, env=os.environ | SETTINGS | _member(running), capture_output=True, text=True, timeout=120
    )
    assert second.returncode == 78 and "with other settings" in second.stderr


def test_routers_shed_what_is_too_much_until_the_planner_is_gone(planned: Cluster) -> None:
    wait(lambda: numbers(planned) == (1, 2))
    os.kill(planned.pids["planner"], signal.SIGSTOP)  # another one, who aims at the impossible, takes its place
    shedder = None
    try:
        running = find(planned.url)
        _drop_lease(running, planned.model)
        aims = {
            "TANDEM_PLANNER": "act",
            "TANDEM_PLANNER_TTFT": "0.001",
            "TANDEM_NAME": "shedder",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "services.cli", "serve", "planner"]
        shedder = subprocess.Popen(command, env=os.environ | SETTINGS | _member(running) | aims)
        with Clients(planned) as clients:
            wait(lambda: 429 in clients.statuses)
            refused = next(each for each in (ask(planned, 9) for _ in range(100)) if each.status_code == 429)
        assert refused.json()["error"]["code"] == "load_shed" and int(refused.headers["retry-after"]) >= 1
        assert planned.metric("tandem_router_shed_total", reason="planner") >= 1
        assert planned.metric("tandem_router_shed_share") == planned.metric("tandem_planner_shed") > 0
        assert {200, 429} == set(clients.statuses)
        status = " ".join(_tandem("router", "status", "--url", planned.url).split())
        assert "of its requests are refused for the planner" in status
        assert re.search(r"shed \d+ % of the arrivals|shed: \d+ %", _tandem("plan", "explain", "--url", planned.url))
        shedder.kill()
        shedder.wait()
        wait(lambda: planned.metric("tandem_router_shed_share") == 0)
        with Clients(planned) as clients:
            clients.wait(10)
        assert set(clients.statuses) == {200}
    finally:
        if shedder is not None:
            shedder.kill()
            shedder.wait()
            _drop_lease(running, planned.model)
        os.kill(planned.pids["planner"], signal.SIGCONT)
    before = decisions(planned)[0]["number"]
    wait(lambda: decisions(planned)[0]["number"] > before)


def test_decisions_are_explained(planned: Cluster) -> None:
    wait(lambda: numbers(planned) == (1, 2))
    with Clients(planned, threads=1) as clients:
        clients.wait(10)
    command = [sys.executable, "-m", "services.cli", "plan", "explain", "--url", planned.url]
    lines = subprocess.run([*command, "--last", "20", "--json"], capture_output=True, text=True, timeout=120).stdout
    found = [json.loads(line) for line in lines.splitlines()]
    assert len(found) == 20 and any((each["window"]["arrivals"] or 0) > 0 for each in found)
    text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "requests/s" in text and "because" in text
    refused = httpx.get(planned.admin + "/admin/planner?last=many", timeout=30)
    assert refused.status_code == 400


def test_a_model_at_rest_is_woken_by_a_request_though_planner_and_gateway_are_new(tmp_path: Path) -> None:
    settings = {
        "TANDEM_PLANNER_INTERVAL": "0.5",
        "TANDEM_PLANNER_MINIMUM": "aggregated=0",
        "TANDEM_PLANNER_ROLES": "aggregated",
    }
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--planner", "act")
    cluster = start_cluster(
        tmp_path, "--aggregated", "1", *options, model=str(tiny_model(tmp_path / "m")), env=settings
    )
    try:
        wait(lambda: bool(decisions(cluster)))
        asyncio.run(_end(cluster, "aggregated-0", "aggregated"))  # as after ten minutes without a request
        wait(lambda: not workers(cluster) and decisions(cluster)[0]["have"]["aggregated"] == 0)
        kill(cluster, "planner")
        kill(cluster, "gateway")  # it knows no card of the model any more, and its counts begin at 0

        def answered() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return ask(cluster, 9).status_code == 200
            return False

        wait(answered, 180)
        assert set(workers(cluster)) == {"aggregated-0"}
    finally:
        stop_cluster(cluster)


async def _end(cluster: Cluster, name: str, role: Role) -> None:
    """As the planner has a worker end."""
    running = find(cluster.url)
    wanted = Wanted(running.state, running.cluster)
    await wanted.end(name, cluster.model, role)
    await wanted.close()


def _member(running: RunningCluster) -> dict[str, str]:
    """What a process must be told to be one of the cluster."""
    return {
        "TANDEM_STATE": running.state,
        "TANDEM_CLUSTER_KEY": running.cluster_key,
        "TANDEM_CLUSTER": running.cluster,
    }


def _tandem(*arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def _drop_lease(running: RunningCluster, model: str) -> None:
    """As if it had run out."""
    redis.Redis.from_url(running.state).delete(f"{running.cluster}:lease:planner:{model}")


def _state_servers(up: int) -> list[int]:
    """Processes of the embedded server among the children of `tandem up`."""
    children = [pid for file in Path(f"/proc/{up}/task").glob("*/children") for pid in file.read_text().split()]
    return [int(pid) for pid in children if "python" not in Path(f"/proc/{pid}/comm").read_text()]
