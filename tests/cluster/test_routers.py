"""Several routers in a real cluster: they share the load of requests over HTTP, and die under them."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.clients import Clients, ask
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

UNASKED = itertools.count(1000, 100)  # first tokens of prompts that no try has asked yet
OPTIONS = ("--aggregated", "2", "--threads", "1", "--dummy-seed", "1", "--kv-memory", "64MiB")


def started(folder: Path, routers: int) -> Cluster:
    return start_cluster(folder, "--routers", str(routers), *OPTIONS, model=str(tiny_model(folder / "tiny")))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = started(tmp_path_factory.mktemp("two"), 2)
    yield cluster
    stop_cluster(cluster)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = started(tmp_path_factory.mktemp("one"), 1)
    yield cluster
    stop_cluster(cluster)


def wait_for(cluster: Cluster, name: str, value: float, seconds: float = 60.0, **labels: str) -> None:
    deadline = time.monotonic() + seconds
    while cluster.metric(name, **labels) != value:
        assert time.monotonic() < deadline, f"{name} {labels} is {cluster.metric(name, **labels)}, not {value}"
        time.sleep(0.1)


class Streams:
    """Long answers under way at once, which are cut at the end of the block."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        body = {"model": cluster.model, "prompt": list(range(500, 600)), "max_tokens": 1900, "ignore_eos": True}
        self._lines = []  # a generator that is dropped would end its answer
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                url = f"{cluster.url}/v1/completions"
                answer = stack.enter_context(httpx.stream("POST", url, json=body | {"stream": True}, timeout=120))
                self._lines.append(answer.iter_lines())
                assert next(self._lines[-1])
            self._stack = stack.pop_all()

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def router_command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "router", *arguments, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def kill_router(cluster: Cluster, name: str) -> None:
    """SIGKILL; the supervisor starts another one."""
    os.kill(cluster.pids[name], signal.SIGKILL)


def test_both_place_and_both_know_the_load_of_both(two: Cluster) -> None:
    names = ("router", "router-1")
    assert set(names) <= two.pids.keys()
    first, before = next(UNASKED), [two.metric("tandem_router_placements_total", worker=name) for name in names]
    for number in range(16):
        assert ask(two, first + number).status_code == 200
    after = [two.metric("tandem_router_placements_total", worker=name) for name in names]
    placed = [now - was for now, was in zip(after, before, strict=True)]
    assert sum(placed) == 16 and min(placed) > 0
    with Streams(two, 6):
        for name in names:
            wait_for(two, "tandem_router_reservations", 6, worker=name)
    for name in names:  # their ends reach both, too
        wait_for(two, "tandem_router_reservations", 0, worker=name)
        assert 0 < two.metric("tandem_router_staleness_seconds", worker=name) < 60


def test_both_say_how_they_are(two: Cluster) -> None:
    first = next(UNASKED)
    for _ in range(2):
        ask(two, first)
    told = json.loads(router_command(two, "status", "--json").stdout)
    assert [each["name"] for each in told] == ["router", "router-1"]
    for each in told:
        assert (each["policy"], each["mode"], each["reason"], each["routers"]) == ("prefix", "prefix", "", 1)
        assert each["caches"]["known"] == 2 and int(each["blocks"]) > 0 and each["staleness_seconds"] < 60
    shown = router_command(two, "status")
    assert shown.returncode == 0 and "router-1" in shown.stdout and "2 known" in shown.stdout
    (latest,) = json.loads(router_command(two, "explain", "--json").stdout)
    assert latest["predicted_tokens"] == latest["found_tokens"] == 128


def test_a_prefix_that_one_has_routed_attracts_at_the_other(two: Cluster) -> None:
    first = next(UNASKED)
    answers = [ask(two, first).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(8)]
    assert answers == [0] + [128] * 7


def test_a_killed_router_fails_no_request_where_there_is_another(two: Cluster) -> None:
    with Clients(two) as clients:
        clients.wait(8)
        for name in ("router", "router-1"):
            kill_router(two, name)
            clients.wait(20)
            event = two.wait_event("restarted", 120)
            assert event["name"] == name
            wait_for(two, "tandem_router_workers", 2, worker=name, role="aggregated")
            clients.wait(8)
    assert set(clients.statuses) == {200}
    for name in ("router", "router-1"):
        wait_for(two, "tandem_router_reservations", 0, seconds=90, worker=name)


def test_the_only_router_is_waited_for(one: Cluster) -> None:
    """Cold, it knows what the workers hold again: the same prompt is found where it lies."""
    assert ask(one, 1).status_code == 200
    blocks = one.metric("tandem_router_index_blocks")
    with Clients(one) as clients:
        clients.wait(8)
        kill_router(one, "router")
        clients.wait(20)
    assert set(clients.statuses) == {200}
    wait_for(one, "tandem_router_reservations", 0)
    one.wait_least("tandem_router_index_blocks", blocks)
    assert ask(one, 1).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


def test_a_cluster_has_a_router() -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--routers", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode and "--routers 1" in refused.stderr
