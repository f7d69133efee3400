"""Each worker keeps to its phase: decode workers compute no prompts unless asked, and then in small chunks."""

import concurrent.futures
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from faults_hit import must_hit

UNASKED = itertools.count(700, 7)  # first tokens of prompts that no try has asked yet


def ask(cluster: Cluster, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | more
    answer = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def steps(cluster: Cluster, role: str) -> dict[str, float]:
    kinds = ("decode", "prefill", "mixed")
    return {kind: cluster.metric("tandem_engine_steps_total", role=role, kind=kind) for kind in kinds}


def test_a_decode_worker_computes_no_prompt_unless_asked(tmp_path: Path) -> None:
    # Few at once, so that most requests wait for room; a prompt is not computed here instead of that.
    options = ("--dummy-seed", "5", "--threads", "1", "--local-prefill-tokens", "0", "--max-running", "4")
    cluster = start_cluster(tmp_path / "up", *options, model=str(tiny_model(tmp_path / "tiny")))
    try:
        prompts = [[(37 * n + 11 * i) % 40_000 + 10 for i in range(1 + 23 * n % 400)] for n in range(16)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda prompt: ask(cluster, prompt, 20), prompts))
        assert all(answer["usage"]["completion_tokens"] == 20 for answer in answers)
        cluster.wait_idle()
        assert cluster.metric("tandem_kv_transfers_total", outcome="committed") == len(prompts)
        computed = cluster.metric("tandem_prompt_tokens_total", source="computed", role="prefill")
        assert computed == sum(map(len, prompts))
        assert cluster.metric("tandem_prompt_tokens_total", source="computed", role="decode") == 0
        decode, prefill = steps(cluster, "decode"), steps(cluster, "prefill")
        assert decode["decode"] > 0 and decode["prefill"] == decode["mixed"] == 0
        assert prefill["prefill"] > 0 and prefill["decode"] == prefill["mixed"] == 0

        # Asked: scores of a prompt are computed where they are needed, beside the stream and 128 tokens a step at most.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(ask, cluster, [9], 1900)
            cluster.wait_least("tandem_engine_steps_total", decode["decode"] + 5, role="decode", kind="decode")
            ask(cluster, list(range(10, 1210)), 0, echo=True, logprobs=0)
            must_hit(not stream.done(), "the stream was over before the scores")
            assert stream.result()["usage"]["completion_tokens"] == 1900
        assert cluster.metric("tandem_prompt_tokens_total", source="computed", role="decode") == 1200
        assert steps(cluster, "decode")["mixed"] >= 1200 / 128 and steps(cluster, "decode")["prefill"] == 0
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)


def test_a_short_prompt_passes_a_long_one(tmp_path: Path) -> None:
    """Where arrival alone counts: tests/engine/test_prompt_order.py."""
    options = ("--aggregated", "1", "--dummy-seed", "5", "--threads", "1", "--max-batched-tokens", "4")
    cluster = start_cluster(tmp_path / "up", *options, model=str(tiny_model(tmp_path / "tiny")))
    try:
        long = list(range(10, 1910))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ended: list[str] = []
            first = pool.submit(lambda: (ask(cluster, long, 1), ended.append("long")))
            cluster.wait_least("tandem_prompt_tokens_total", 1, source="computed")
            second = pool.submit(lambda: (ask(cluster, [9, 8, 7, 6, 5, 4], 8), ended.append("short")))
            first.result()
            second.result()
        must_hit(ended == ["short", "long"], "the long one was computed before the short one came")
        cluster.wait_idle()
    finally:
        stop_cluster(cluster)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With little room. A router holds what it knows to have no room, so that here are two."""
    folder = tmp_path_factory.mktemp("tight")
    options = ("--dummy-seed", "5", "--threads", "1", "--local-prefill-tokens", "0", "--kv-blocks", "40")
    running = start_cluster(folder, *options, "--routers", "2", model=str(tiny_model(folder / "tiny")))
    yield running
    stop_cluster(running)


def test_small_requests_do_not_take_the_room_that_a_large_one_waits_for(tight: Cluster) -> None:
    answered, counter = threading.Event(), itertools.count()

    def ask_small_ones() -> None:
        while not answered.is_set() and (number := next(counter)) < 300:
            ask(tight, [100 * number + 10 + i for i in range(60)], 60)

    committed = tight.metric("tandem_kv_transfers_total", outcome="committed")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(ask_small_ones) for _ in range(8)]
        tight.wait_least("tandem_kv_transfers_total", committed + 8, outcome="committed")
        ask(tight, list(range(20_000, 20_560)), 4)  # most of the pool
        before_the_end = next(counter) < 300
        answered.set()
        for stream in streams:
            stream.result()
    assert before_the_end
    tight.wait_idle()


def test_requests_wait_for_blocks_and_it_is_said(tight: Cluster) -> None:
    """A decode worker without blocks grants none: no prefill starts, and metrics and trace tell.

    Two routers give the last room away at the same time.
    """
    waited = tight.metric("tandem_kv_credit_wait_seconds_count")
    committed = tight.metric("tandem_kv_transfers_total", outcome="committed")
    asked = 0
    while tight.metric("tandem_kv_credit_wait_seconds_count") == waited:
        must_hit(asked < 80, "both routers never placed at the same time")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            # Each takes most of the pool, for as long as it decodes.
            prompts = [list(range(first, first + 500)) for first in itertools.islice(UNASKED, 4)]
            answers = list(pool.map(lambda prompt: ask(tight, prompt, 100), prompts))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 4
        asked += 4
    assert tight.metric("tandem_kv_credits_waiting") == 0
    assert tight.metric("tandem_kv_transfers_total", outcome="committed") == committed + asked
    command = [sys.executable, "-m", "services.cli", "kv", "trace", "--url", tight.url]
    traces = [
        subprocess.run([*command, answer["id"]], capture_output=True, text=True, timeout=120).stdout
        for answer in answers
    ]
    assert "waits for blocks" in "".join(traces), traces
    tight.wait_idle()
