"""Prefill and decode in two network namespaces with own addresses: token-exact, also when they are cut apart."""

import concurrent.futures
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from cluster.two_hosts import Network, cluster_on, network
from faults_hit import must_hit

OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")
Answers = list[list[str]]
SHORT = 8  # prompts
LONG = SHORT  # number of a long prompt, that nobody has asked before
LONG_TOKENS = 1000
UNASKED = itertools.count(200)


def ask(cluster: Cluster, number: int, num_tokens: int = 0) -> list[str]:
    """`num_tokens`: of the prompt; 0: by its number."""
    num_tokens = num_tokens or (LONG_TOKENS if number == LONG else 60 + 17 * number)
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(num_tokens)],
        "max_tokens": 24,
        "temperature": 0.9 if number % 2 else 0,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["logprobs"]["tokens"])


def ask_all(cluster: Cluster, count: int = SHORT) -> Answers:
    with concurrent.futures.ThreadPoolExecutor(SHORT) as pool:
        return list(pool.map(lambda number: ask(cluster, number), range(count)))


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With much KV for what it computes: 3 kB a token."""
    return tiny_model(tmp_path_factory.mktemp("hosts") / "tiny", head_dim=64)


@pytest.fixture(scope="module")
def alone(net: Network, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    """Of one aggregated worker, to prompts of all lengths and to long ones."""
    running = start_cluster(tmp_path_factory.mktemp("one"), "--aggregated", "1", *OPTIONS, model=str(model))
    try:
        return ask_all(running, LONG + 1), long_prompts(running, 100, 8)
    finally:
        stop_cluster(running)


@pytest.fixture(scope="module")
def expected(alone: tuple[Answers, Answers]) -> Answers:
    return alone[0]


@pytest.fixture(scope="module")
def long_answers(alone: tuple[Answers, Answers]) -> Answers:
    return alone[1]


def committed(cluster: Cluster) -> float:
    return cluster.metric("tandem_kv_transfers_total", outcome="committed")


@pytest.mark.parametrize("connector", ["tcp", "zmq"])
def test_two_hosts_answer_as_one_also_over_a_slow_link(
    connector: str, net: Network, model: Path, expected: Answers, tmp_path: Path
) -> None:
    """A transfer that takes longer than a lease is not given up while bytes move."""
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", connector) as cluster:
        before = net.bytes_to("decode")
        assert ask_all(cluster) == expected[:SHORT]
        assert committed(cluster) == SHORT
        moved = cluster.metric("tandem_kv_transfer_bytes_total", connector=connector)
        assert 0 < moved < net.bytes_to("decode") - before, "the KV took another way"
        cluster.wait_idle()
        seconds = cluster.metric("tandem_kv_transfer_seconds_sum")
        with net.slow("prefill", "3200kbit"):
            assert ask(cluster, LONG) == expected[LONG]
        # On a busy machine a stream may be lost all the same, to TCP's retries. Then the prompt is computed again, and
        # the next ones as well: the router has learnt how long it takes.
        must_hit(committed(cluster) == SHORT + 1, "the transfer was lost")
        assert cluster.metric("tandem_kv_transfer_seconds_sum") - seconds > 6, "the link was not slow"
        cluster.wait_idle()


def test_workers_that_are_cut_apart_go_on_alone_and_find_together(
    net: Network, model: Path, expected: Answers, tmp_path: Path
) -> None:
    """Both are alive to everybody else. What prefill sends is lost, and then what decode sends."""
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", "tcp") as cluster:
        assert ask_all(cluster) == expected[:SHORT]
        for source, target in (("prefill", "decode"), ("decode", "prefill")):
            before = cluster.metric("tandem_kv_transfers_total", outcome="recomputed")
            with net.cut(source, target):
                assert ask_all(cluster) == expected[:SHORT]
                assert cluster.metric("tandem_kv_transfers_total", outcome="recomputed") > before
                must_hit(cluster.metric("tandem_member_up") == 4, "one was not heard, for another reason")
            before, deadline = committed(cluster), time.monotonic() + 60
            while committed(cluster) == before:
                assert time.monotonic() < deadline, "they do not find together again"
                assert ask(cluster, 7) == expected[7]
            cluster.wait_idle()


def packed(cluster: Cluster) -> tuple[float, float]:
    """KV bytes that came packed so far: as they are, and as they were on the way."""
    unpacked, packed = (cluster.metric("tandem_kv_codec_bytes_total", form=form) for form in ("unpacked", "packed"))
    return unpacked, packed


def long_prompts(cluster: Cluster, first: int, count: int = 4) -> Answers:
    """Of a thousand tokens each; numbers begin a prompt of their own."""
    return [ask(cluster, number, LONG_TOKENS) for number in range(first, first + count)]


def goes_plain(cluster: Cluster) -> None:
    """Asks long prompts until KV is not packed any more: what was found of the link before is outweighed."""
    deadline = time.monotonic() + 120
    for number in UNASKED:
        before, moved = packed(cluster), committed(cluster)
        ask(cluster, number, LONG_TOKENS)
        if packed(cluster) == before and committed(cluster) > moved:
            return
        assert time.monotonic() < deadline, "the link is fast, and KV is packed"


def test_kv_is_packed_where_the_link_is_slow_and_only_there(
    net: Network, model: Path, expected: Answers, long_answers: Answers, tmp_path: Path
) -> None:
    with cluster_on(net, tmp_path, model, *OPTIONS, "--connector", "tcp") as cluster:
        assert ask_all(cluster) == expected[:SHORT]
        assert long_prompts(cluster, 100) == long_answers[:4]
        goes_plain(cluster)  # a busy machine may have made the link look slow
        before = packed(cluster)
        with net.slow("prefill", "16mbit"):
            assert long_prompts(cluster, 104) == long_answers[4:]
            unpacked, on_the_way = (now - was for now, was in zip(packed(cluster), before, strict=True))
            assert 0 < on_the_way < 0.95 * unpacked
        goes_plain(cluster)
        cluster.wait_idle()
        must_hit(cluster.metric("tandem_kv_transfers_total", outcome="recomputed") == 0, "a transfer was lost")
