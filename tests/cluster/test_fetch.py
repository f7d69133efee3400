"""Prefixes that another worker has cached are fetched from there, over HTTP: the same tokens, less to compute."""

import concurrent.futures
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import kill
from cluster.tiny import SLOW, tiny_model
from faults_hit import must_hit
from supervised import state

TOKENS = 1900  # of a prompt
BLOCK = 16
TRIES = itertools.count()  # of what needs new workers
UNASKED = itertools.count(10)  # numbers of prompts that no try has asked yet


def start(tmp_path_factory: pytest.TempPathFactory, *options: str) -> Cluster:
    folder = tmp_path_factory.mktemp("fetch")
    fixed = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--fetch-tokens", "64")
    return start_cluster(folder, *fixed, *options, model=str(tiny_model(folder / "tiny", **SLOW)))


@pytest.fixture(scope="module")
def equals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two aggregated workers that take turns, whatever they have cached."""
    running = start(tmp_path_factory, "--aggregated", "2", "--policy", "round_robin")
    yield running
    stop_cluster(running)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start(tmp_path_factory, "--local-prefill-tokens", "0")
    yield running
    stop_cluster(running)


def ask(cluster: Cluster, number: int, *, more: int = 0, salt: str = "", max_tokens: int = 24) -> tuple[list[str], int]:
    """Tokens of the answer to prompt `number`, and how many of the prompt's were cached. `more` of them end it."""
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(TOKENS + more)],
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = httpx.post(
        cluster.url + "/v1/completions", json=body | ({"cache_salt": salt} if salt else {}), timeout=120
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["logprobs"]["tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def fetched(cluster: Cluster, **labels: str) -> float:
    return cluster.metric("tandem_kv_fetched_blocks_total", **labels)


def failed(cluster: Cluster) -> float:
    return cluster.metric("tandem_kv_fetches_total") - cluster.metric("tandem_kv_fetches_total", outcome="committed")


def holder(cluster: Cluster) -> str:
    """The worker that has generated most, when the answers so far were one more of one than of the other."""
    counts = {
        name: cluster.metric("tandem_generated_tokens_total", worker=name) for name in ("aggregated-0", "aggregated-1")
    }
    return max(counts, key=lambda name: counts[name])


def anew(cluster: Cluster, *names: str) -> None:
    """Other workers in the place of these."""
    for name in names:
        kill(cluster, name)
    ends = time.monotonic() + 120
    while cluster.metric("tandem_router_workers") != 2 or any(
        cluster.metric("tandem_member_up", worker=name) != 1 for name in names
    ):
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_worker_killed_while_it_is_asked_costs_nothing_but_time(equals: Cluster) -> None:
    """First, as workers that have measured nothing are patient: what is waited for is sure to be under way."""
    if next(TRIES):
        anew(equals, "aggregated-0", "aggregated-1")
    expected, cached = ask(equals, 1)  # by one worker
    assert cached == 0
    victim = holder(equals)
    equals.wait_least("tandem_router_index_blocks", TOKENS // BLOCK)
    again, cached = ask(equals, 1)  # by the other, which fetches
    assert again == expected and cached == (TOKENS - 1) // BLOCK * BLOCK
    assert fetched(equals) == (TOKENS - 1) // BLOCK
    expected, _ = ask(equals, 2)
    assert holder(equals) == victim
    equals.wait_least("tandem_router_index_blocks", 2 * (TOKENS // BLOCK))
    answers: list[tuple[list[str], int]] = []
    client = threading.Thread(target=lambda: answers.append(ask(equals, 2)))
    pid = equals.pids[victim]
    os.kill(pid, signal.SIGSTOP)
    while state(pid) != "T":
        time.sleep(0.001)
    client.start()
    time.sleep(0.4)
    must_hit(client.is_alive(), "it was not waited for")
    kill(equals, victim)
    client.join(120)
    assert answers == [(expected, 0)]
    assert failed(equals) == equals.metric("tandem_kv_fetches_total", outcome="lost") == 1
    equals.wait_idle()


def test_the_same_prefix_on_another_worker_is_fetched_and_gives_the_same_tokens(equals: Cluster) -> None:
    before = fetched(equals)
    blocks = int(equals.metric("tandem_router_index_blocks"))
    numbers = list(itertools.islice(UNASKED, 5))
    expected = [ask(equals, number, salt="nobody has it")[0] for number in numbers]
    for at, number in enumerate(numbers, 1):
        tokens, cached = ask(equals, number)
        assert cached == 0
        known = blocks + (len(numbers) + at) * (TOKENS // BLOCK)  # the salted ones, and these so far
        equals.wait_least("tandem_router_index_blocks", known)
        again, cached = ask(equals, number)
        assert tokens == again == expected[at - 1]
    must_hit(fetched(equals) > before, "computing was believed to be quicker each time")
    equals.wait_idle()
    command = [sys.executable, "-m", "services.cli", "kv", "trace", "--json", "--url", equals.url]
    (trace,) = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert trace["transfer"].endswith("/fetch") and trace["bytes"]
    assert {trace["prefill"], trace["decode"]} == {"aggregated-0", "aggregated-1"}
    assert {"linked", "reserved", "sent", "committed"} <= {event["event"] for event in trace["events"]}


def test_a_new_prefill_worker_takes_from_the_decode_worker_what_it_lacks(pair: Cluster) -> None:
    """In time, unless the machine is too busy: then it is computed, with the same tokens."""
    for number in itertools.islice(UNASKED, 4):
        expected = ask(pair, number, more=100, salt="computed")[0]
        ask(pair, number)
        anew(pair, "prefill-0")
        tokens, cached = ask(pair, number, more=100)
        assert tokens == expected
        if fetched(pair, role="prefill"):
            assert cached == fetched(pair, role="prefill") * BLOCK == TOKENS // BLOCK * BLOCK
            break
    else:
        must_hit(False, "nothing was fetched in four times")
    pair.wait_idle()


def test_a_busy_worker_gives_its_prefix_to_an_idle_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the router's own choice: requests go where their prefix is until too many are there."""
    cluster = start(tmp_path_factory, "--aggregated", "2")
    try:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            expected = [ask(cluster, 1, more=number, salt=f"{number}")[0] for number in range(16)]
            ask(cluster, 1)
            cluster.wait_least("tandem_router_index_blocks", TOKENS // BLOCK)
            answers = list(pool.map(lambda number: ask(cluster, 1, more=number, max_tokens=200), range(16)))
        assert [tokens[:24] for tokens, _ in answers] == expected
        must_hit(cluster.metric("tandem_router_fetches_total"), "all went where the prefix was")
        must_hit(cluster.metric("tandem_kv_fetches_total"), "nobody tried")  # on a busy machine all may come too late
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)
