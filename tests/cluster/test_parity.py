"""Disaggregated output equals aggregated output, token for token and logprob for logprob, whatever happens between."""

import concurrent.futures
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from optional import needs_nixl

NUM_REQUESTS = 100
FEW = 30  # of them, where one connector or size of blocks among several is tried


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Random lengths, shared prefixes, greedy and seeded sampling, penalties, biases, stops."""
    rng = random.Random(11)
    prefixes = [[rng.randrange(3, 49_000) for _ in range(length)] for length in (16, 40, 64, 100)]
    requests = []
    for number in range(count):
        prompt = rng.choice([[], *prefixes]) + [rng.randrange(3, 49_000) for _ in range(rng.randint(1, 90))]
        request: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0, 0, 0.7, 1.3]),
            "seed": number,
            "logprobs": 1,
            "ignore_eos": True,
        }
        if rng.random() < 0.3:
            request |= {"top_p": rng.choice([0.5, 0.9]), "top_k": rng.choice([0, 5, 50])}
        if rng.random() < 0.3:
            request |= {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2}
        if rng.random() < 0.2:
            request |= {"logit_bias": {"100": 3, "200": -100}, "min_tokens": 1}
        requests.append(request)
    return requests


def answers(cluster: Cluster, requests: list[dict[str, Any]]) -> list[tuple[list[str], list[float], str]]:
    def ask(request: dict[str, Any]) -> tuple[list[str], list[float], str]:
        body = {"model": cluster.model} | request
        response = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        return list(pool.map(ask, requests))


def greedy_requests() -> list[dict[str, Any]]:
    return [request | {"temperature": 0} for request in mixed_requests(FEW)]


COMMON = ("--dummy-seed", "5", "--threads", "1")
Answers = list[tuple[list[str], list[float], str]]


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    """Of one worker, to the mixed and to the greedy requests."""
    folder = tmp_path_factory.mktemp("aggregated")
    cluster = start_cluster(folder, "--aggregated", "1", *COMMON, model=str(tiny_model(folder / "tiny")))
    try:
        return answers(cluster, mixed_requests(NUM_REQUESTS)), answers(cluster, greedy_requests())
    finally:
        stop_cluster(cluster)


@pytest.fixture(scope="module")
def aggregated_answers(aggregated: tuple[Answers, Answers]) -> Answers:
    return aggregated[0]


@pytest.mark.parametrize(
    ("connector", "count"),
    [
        ("shared_memory", NUM_REQUESTS),
        ("gloo", FEW),
        pytest.param("nixl", FEW, marks=needs_nixl),
    ],
)
def test_disaggregated_equals_aggregated(
    connector: str, count: int, aggregated_answers: Answers, tmp_path: Path
) -> None:
    """Other connectors: `test_blocks_of_other_sizes`, and with blocks of one size test_two_hosts.py."""
    requests = mixed_requests(NUM_REQUESTS)[:count]
    model = str(tiny_model(tmp_path / "tiny"))
    # Little room and small steps: chunks, waiting for room, evictions and preemptions all happen.
    tight = ("--kv-blocks", "60", "--max-batched-tokens", "40", "--local-prefill-tokens", "0")
    cluster = start_cluster(tmp_path / "d", *COMMON, *tight, "--connector", connector, model=model)
    try:
        got = answers(cluster, requests)
        assert cluster.metric("tandem_kv_transfers_total", outcome="committed") > count / 2
        assert cluster.metric("tandem_kv_transfer_bytes_total", connector=connector) > 0
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)
    different = [number for number in range(count) if got[number] != aggregated_answers[number]]
    assert different == []


@pytest.mark.parametrize(
    ("connector", "prefill", "decode"),
    [("zmq", 16, 5), ("tcp", 8, 24)],
)
def test_blocks_of_other_sizes(
    connector: str, prefill: int, decode: int, aggregated_answers: Answers, tmp_path: Path
) -> None:
    """Each side keeps its cache, its hashes and its references by its own blocks; prefixes hit on both."""
    count = FEW
    sizes = ("--prefill-setting", f"block_size={prefill}", "--decode-setting", f"block_size={decode}")
    room = ("--prefill-setting", f"kv_blocks={900 // prefill}", "--decode-setting", f"kv_blocks={900 // decode}")
    more = ("--max-batched-tokens", "40", "--local-prefill-tokens", "0", "--connector", connector)
    model = str(tiny_model(tmp_path / "tiny"))
    cluster = start_cluster(tmp_path / "d", *COMMON, *sizes, *room, *more, model=model)
    try:
        requests = mixed_requests(NUM_REQUESTS)[:count]
        got = answers(cluster, requests) + answers(cluster, requests[:8])
        assert cluster.metric("tandem_kv_transfers_total", outcome="committed") > count / 2
        assert cluster.metric("tandem_kv_transfers_total", outcome="recomputed") == 0
        assert cluster.metric("tandem_kv_transfer_bytes_total", connector=connector) > 0
        assert cluster.metric("tandem_router_overlap_blocks_total", kind="predicted") > 0
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)
    expected = aggregated_answers[:count] + aggregated_answers[:8]
    assert [number for number in range(count + 8) if got[number] != expected[number]] == []


def test_kv_that_is_rounded_on_its_way(aggregated: tuple[Answers, Answers], tmp_path: Path) -> None:
    """From a cache of float32 into one of FP8: the first token is computed without rounding, what follows nearly so."""
    requests, expected = greedy_requests(), aggregated[1]
    model = str(tiny_model(tmp_path / "tiny"))
    fp8 = ("--decode-setting", "kv_dtype=fp8", "--decode-setting", "block_size=8", "--local-prefill-tokens", "0")
    cluster = start_cluster(tmp_path / "fp8", *COMMON, *fp8, model=model)
    try:
        got = answers(cluster, requests)
        assert cluster.metric("tandem_kv_transfers_total", outcome="committed") == len(requests)
        assert cluster.metric("tandem_kv_transfers_total", outcome="recomputed") == 0
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)
    assert [(t[:1], p[:1]) for t, p, _ in got] == [(t[:1], p[:1]) for t, p, _ in expected]
    same = [
        (p, q)
        for (t, ps, _), (u, qs, _) in zip(got, expected, strict=True)
        if t == u
        for p, q in zip(ps, qs, strict=True)
    ]
    assert len(same) > 5 * FEW
    differences = [abs(p - q) for p, q in same]
    assert 0 < sum(differences) / len(same) < 0.002
