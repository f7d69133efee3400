"""Prefill and decode in two network namespaces with own addresses: token-exact, also when they are cut apart."""

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from cluster.two_hosts import Network, cluster_on, network

OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")
Answers = list[list[str]]
LONG = 12  # number of a long prompt, that nobody has asked before


def ask(cluster: Cluster, number: int) -> list[str]:
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(1000 if number == LONG else 60 + 17 * number)],
        "max_tokens": 24,
        "temperature": 0.9 if number % 2 else 0,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = httpx.post(cluster.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["logprobs"]["tokens"])


def ask_all(cluster: Cluster, count: int = 12) -> Answers:
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda number: ask(cluster, number), range(count)))


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("hosts") / "tiny")


@pytest.fixture(scope="module")
def expected(net: Network, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of one aggregated worker."""
    running = start_cluster(tmp_path_factory.mktemp("one"), "--aggregated", "1", *OPTIONS, model=str(model))
    try:
        return ask_all(running, LONG + 1)
    finally:
        stop_cluster(running)


def committed(cluster: Cluster) -> float:
    return cluster.metric("tandem_kv_transfers_total", outcome="committed")


@pytest.mark.parametrize("connector", ["tcp", "zmq"])
def test_two_hosts_answer_as_one(connector: str, net: Network, model: Path, expected: Answers, tmp_path: Path) -> None:
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", connector) as cluster:
        before = net.bytes_to("decode")
        assert ask_all(cluster) == expected[:12]
        assert committed(cluster) == 12
        moved = cluster.metric("tandem_kv_transfer_bytes_total", connector=connector)
        assert 0 < moved < net.bytes_to("decode") - before, "the KV took another way"
        cluster.wait_idle()


def test_workers_that_are_cut_apart_go_on_alone_and_find_together(
    net: Network, model: Path, expected: Answers, tmp_path: Path
) -> None:
    """Both are alive to everybody else. What prefill sends is lost, and then what decode sends."""
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", "tcp") as cluster:
        assert ask_all(cluster) == expected[:12]
        for source, target in (("prefill", "decode"), ("decode", "prefill")):
            before = cluster.metric("tandem_kv_transfers_total", outcome="recomputed")
            with net.cut(source, target):
                assert ask_all(cluster) == expected[:12]
                assert cluster.metric("tandem_kv_transfers_total", outcome="recomputed") > before
                assert cluster.metric("tandem_member_up") == 4
            before, deadline = committed(cluster), time.monotonic() + 30
            while committed(cluster) == before:
                assert time.monotonic() < deadline, "they do not find together again"
                assert ask(cluster, 11) == expected[11]
            cluster.wait_idle(15)


@pytest.mark.parametrize("connector", ["tcp", "zmq"])
def test_a_slow_link_is_no_dead_one(
    connector: str, net: Network, model: Path, expected: Answers, tmp_path: Path
) -> None:
    """A transfer that takes longer than a lease is not given up while bytes move."""
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", connector) as cluster:
        assert ask_all(cluster, 2) == expected[:2]
        seconds = cluster.metric("tandem_kv_transfer_seconds_sum")
        with net.slow("prefill", "800kbit"):
            assert ask(cluster, LONG) == expected[LONG]
        assert committed(cluster) == 3
        assert cluster.metric("tandem_kv_transfer_seconds_sum") - seconds > 6, "the link was not slow"
        cluster.wait_idle()
