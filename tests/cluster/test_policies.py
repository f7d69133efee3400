"""Policies in a real cluster: requests go where they say. All of them: tests/services/test_router_policies.py."""

import concurrent.futures
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

POLICIES = ("prefix", "session")  # what follows caches, and what needs a header
WORKERS = ("aggregated-0", "aggregated-1")
TOKENS = 2  # of each answer
TRIES = itertools.count(1)  # prompts and sessions of another one are new


@pytest.fixture(scope="module", params=POLICIES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Cluster]]:
    folder = tmp_path_factory.mktemp(request.param)
    cluster = start_cluster(
        folder,
        *("--policy", request.param, "--aggregated", "2", "--threads", "1", "--dummy-seed", "1"),
        *("--kv-memory", "64MiB", "--fetch-tokens", "0"),
        model=str(tiny_model(folder / "tiny")),
    )
    yield request.param, cluster
    stop_cluster(cluster)


def ask(cluster: Cluster, first: int, session: str = "") -> int:
    """Asks a prompt of 8 blocks that begins with token `first`; cached tokens."""
    body: dict[str, Any] = {"model": cluster.model, "prompt": [first, *range(500, 630)], "max_tokens": TOKENS}
    body["ignore_eos"] = True
    headers = {"X-Session-ID": session} if session else {}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def spread(cluster: Cluster) -> list[float]:
    """Requests that each worker has answered."""
    return [cluster.metric("tandem_generated_tokens_total", worker=worker) / TOKENS for worker in WORKERS]


def both_work(cluster: Cluster, alone: list[float], first: int) -> bool:
    """Whether both answer prompts that none has, before long."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if all(after > before for after, before in zip(spread(cluster), alone, strict=True)):
            return True
        with concurrent.futures.ThreadPoolExecutor(6) as pool:  # more than one has time for
            list(pool.map(lambda number: ask(cluster, number), range(first, first + 6)))
        first += 6
    return False


def explain(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "router", "explain", *arguments, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_requests_go_where_the_policy_says(running: tuple[str, Cluster]) -> None:
    policy, cluster = running
    first, user = 2000 * (number := next(TRIES)), f"user {number}"
    before = spread(cluster)
    same = [ask(cluster, first) for _ in range(6)]
    alone = spread(cluster)
    # One worker has the prompt, or is where it goes.
    assert sorted(after - was for after, was in zip(alone, before, strict=True)) == [0, 6]
    assert same == [0] + [128] * 5
    if policy == "prefix":  # until the one is known to be as quick as the other
        assert both_work(cluster, alone, first + 1)
        return
    for number in range(16):
        ask(cluster, first + 200 + number, f"{user} {number}")
    both = [after - was for after, was in zip(spread(cluster), alone, strict=True)]
    assert sum(both) == 16 and min(both) > 0
    before = spread(cluster)
    for number in range(4):  # other prompts of a session follow it
        ask(cluster, first + 300 + number, f"{user} 3")
    assert sorted(after - was for after, was in zip(spread(cluster), before, strict=True)) == [0, 4]
    for number in range(8):
        ask(cluster, first, f"{user} {number}")  # one has it, some ask the other
    assert cluster.metric("tandem_router_fetches_total") == cluster.metric("tandem_kv_fetches_total") == 0  # as is set


def test_the_router_explains(running: tuple[str, Cluster]) -> None:
    policy, cluster = running
    if policy != "prefix":
        pytest.skip("it is the same for all")
    first = 2000 * next(TRIES)
    ask(cluster, first)
    ask(cluster, first)
    told = json.loads(explain(cluster, "--json").stdout)
    (placement,) = told
    assert placement["policy"] == "prefix" and placement["prompt_tokens"] == 131
    (ranking,) = placement["rankings"]
    best, other = ranking["best"]
    assert (ranking["role"], ranking["candidates"], best["expected_tokens"]) == ("decode", 2, 128)
    assert best["cost"] < other["cost"] and {best["name"], other["name"]} == set(WORKERS)
    shown = explain(cluster, placement["attempt"])
    assert shown.returncode == 0 and placement["reason"] in shown.stdout and "→" in shown.stdout
    unknown = explain(cluster, "cmpl-nobody")
    assert unknown.returncode == 78 and "no router remembers 'cmpl-nobody'" in unknown.stderr
