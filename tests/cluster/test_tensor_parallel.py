"""A worker of several ranks answers what a worker of one does, and a rank that dies is a worker that dies."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

PROMPTS = ["The capital of France is", "one two three four five six seven eight nine ten " * 12, "Tandem"]
COMMON = ("--aggregated", "1", "--dummy-seed", "5", "--threads", "1", "--max-batched-tokens", "40")

Answers = list[tuple[list[str], list[float]]]  # tokens and scores, by prompt


def ask(cluster: Cluster, prompt: str, **more: Any) -> tuple[list[str], list[float]]:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 24, "logprobs": 1, "ignore_eos": True} | more
    response = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    logprobs = response.json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def all_answers(cluster: Cluster) -> Answers:
    asked = [partial(ask, cluster, prompt, temperature=0) for prompt in PROMPTS]
    asked += [partial(ask, cluster, prompt, temperature=1.0, seed=3, top_p=0.9) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda each: each(), asked))


def ask_and_leave(cluster: Cluster, number: int) -> None:
    """A client that goes while its prompt is computed, moved, or answered."""
    body = {"model": cluster.model, "prompt": [number + 10] * (40 + 9 * number), "max_tokens": 200, "ignore_eos": True}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", cluster.url + "/v1/completions", json=body | {"stream": True}, timeout=0.02 * (1 + number % 16)
        ) as response,
    ):
        next(response.iter_raw(), None)


def ranks(worker: int) -> list[int]:
    """Processes of other ranks that the worker has started."""
    children = Path(f"/proc/{worker}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"engine.parallel.follow" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As many KV heads as there are ranks at most."""
    folder = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one worker of one rank answers."""
    one = start_cluster(tmp_path_factory.mktemp("one"), *COMMON, model=model)
    try:
        return all_answers(one)
    finally:
        stop_cluster(one)


def assert_alike(found: Answers, expected: Answers) -> None:
    """The same tokens, and scores that are equal within rounding: other ranks or chunks have other last bits."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_two_ranks_answer_as_one_and_die_together(model: str, expected: Answers, tmp_path: Path) -> None:
    patient = {"TANDEM_WORKER_WAIT": "60"}  # a request waits until the worker is back
    two = start_cluster(tmp_path / "two", *COMMON, "--tensor-parallel", "2", model=model, env=patient)
    try:
        found = all_answers(two)
        assert_alike(found, expected)
        two.wait_idle()
        (rank,) = ranks(two.pids["aggregated-0"])
        os.kill(rank, signal.SIGKILL)
        assert two.wait_event("restarted", 120)["name"] == "aggregated-0"
        assert f"rank 1 of 2 (process {rank}) was ended by signal 9" in two.log.read_text()
        assert_alike([ask(two, PROMPTS[0], temperature=0)], found[:1])
    finally:
        stop_cluster(two)


@pytest.mark.parametrize(("prefill", "decode", "connector"), [(2, 1, "shared_memory"), (1, 2, "tcp"), (2, 4, "zmq")])
def test_workers_of_other_numbers_of_ranks_exchange_kv(
    prefill: int, decode: int, connector: str, model: str, expected: Answers, tmp_path: Path
) -> None:
    flags = ("--dummy-seed", "5", "--threads", "1", "--max-batched-tokens", "40", "--local-prefill-tokens", "0")
    sides = ("--prefill-setting", f"tensor_parallel={prefill}", "--decode-setting", f"tensor_parallel={decode}")
    small = ("--prefill-setting", "block_size=8", "--kv-blocks", "200", "--connector", connector)
    patient = {"TANDEM_WORKER_WAIT": "60"}
    both = start_cluster(tmp_path / "both", *flags, *sides, *small, model=model, env=patient)
    try:
        found = all_answers(both)
        assert_alike(found, expected)
        assert_alike(all_answers(both), found)  # with what is cached by now
        assert both.metric("tandem_kv_transfers_total", outcome="committed") == 4 * len(PROMPTS)
        assert both.metric("tandem_kv_transfers_total", outcome="recomputed") == 0
        assert both.metric("tandem_kv_transfer_bytes_total", connector=connector) > 0
        both.wait_idle()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(partial(ask_and_leave, both), range(16)))
        assert_alike(all_answers(both), found)
        both.wait_idle()  # of those that left, nothing is kept on either side
        if prefill + decode > 3:
            return  # sleep and death are the same with more ranks, which take long to start
        for command in ("sleep", "wake"):
            tandem = [sys.executable, "-m", "services.cli", command, "--url", both.url]
            assert subprocess.run(tandem, capture_output=True, timeout=90).returncode == 0
        assert_alike(all_answers(both), found)
        worker = "decode-0" if decode > 1 else "prefill-0"
        os.kill(ranks(both.pids[worker])[0], signal.SIGKILL)
        assert both.wait_event("restarted", 120)["name"] == worker
        after = all_answers(both)  # a decode worker may compute them alone while there is no other
        assert_alike(after, found)
        both.wait_idle()
    finally:
        stop_cluster(both)
