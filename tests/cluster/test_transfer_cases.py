"""Shapes of requests, and clients and workers that leave, that have broken transfers of KV elsewhere."""

import concurrent.futures
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from faults_hit import must_hit

BLOCK = 16
UNASKED = itertools.count(6000, 100)  # numbers of prompts that no try has asked yet
OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("cases") / "tiny"))


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Moves no KV."""
    running = start_cluster(tmp_path_factory.mktemp("alone"), "--aggregated", "1", *OPTIONS, model=model)
    yield running
    stop_cluster(running)


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--prefill", "1", "--decode", "1", *OPTIONS, "--max-batched-tokens", "64")
    running = start_cluster(tmp_path_factory.mktemp("pair"), *options, model=model)
    yield running
    stop_cluster(running)


def prompt(number: int, length: int) -> list[int]:
    return [(977 * number + 13 * i * i + i) % 40_000 + 10 for i in range(length)]


def ask(cluster: Cluster, tokens: list[int], **more: Any) -> Any:
    """All choices, with logprobs."""
    body = {"model": cluster.model, "prompt": tokens, "max_tokens": 12, "logprobs": 1, "ignore_eos": True, "seed": 3}
    answer = httpx.post(cluster.url + "/v1/completions", json=body | more, timeout=120)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def committed(cluster: Cluster) -> float:
    return cluster.metric("tandem_kv_transfers_total", outcome="committed")


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK])
def test_prompts_around_the_ends_of_blocks_and_chunks(length: int, pair: Cluster, alone: Cluster) -> None:
    before, tokens = committed(pair), prompt(next(UNASKED), length)
    assert ask(pair, tokens) == ask(alone, tokens)
    assert committed(pair) == before + 1


@pytest.mark.parametrize("warm", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("length", [6 * BLOCK, 6 * BLOCK + 1])
def test_a_beginning_that_the_decode_worker_has_is_not_moved(
    warm: int, length: int, pair: Cluster, alone: Cluster
) -> None:
    """What is left lands behind it."""
    tokens = prompt(next(UNASKED), length)
    ask(pair, tokens[:warm])
    pair.wait_idle()
    moved = pair.metric("tandem_prompt_tokens_total", source="transferred")
    assert ask(pair, tokens) == ask(alone, tokens)
    least = length - warm - 1  # whole blocks of the prompt and its answer are kept
    assert least <= pair.metric("tandem_prompt_tokens_total", source="transferred") - moved <= length
    assert ask(pair, tokens) == ask(alone, tokens)  # now all of it is there


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"max_tokens": 1, "logprobs": 5},
        {"min_tokens": 5, "ignore_eos": False},
        {"n": 3, "temperature": 1.1},
        {"temperature": 0.8, "presence_penalty": 1.0, "repetition_penalty": 1.3, "max_tokens": 30},
        {"logit_bias": {"77": 100}, "stop_token_ids": [77], "ignore_eos": False},
        {"stop": ["a", "e", "i"], "max_tokens": 60},
    ],
    ids=str,
)
def test_what_a_client_asks_for_is_not_asked_of_the_prefill_alone(
    more: dict[str, Any], pair: Cluster, alone: Cluster
) -> None:
    tokens = prompt(7, 50)
    assert ask(pair, tokens, **more) == ask(alone, tokens, **more)


def test_four_requests_with_one_beginning_at_once(pair: Cluster, alone: Cluster) -> None:
    prompts = [prompt(5000, 70) + prompt(n, 9) for n in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda tokens: ask(pair, tokens), prompts)) == [ask(alone, tokens) for tokens in prompts]


def test_a_long_answer_that_is_read_slowly_is_whole(pair: Cluster) -> None:
    body = {"model": pair.model, "prompt": prompt(8, 40), "max_tokens": 600, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 0, "stream_options": {"include_usage": True}}
    tokens, usage = 0, {}
    with httpx.stream("POST", pair.url + "/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                tokens += sum(len(choice["logprobs"]["tokens"]) for choice in chunk["choices"] if choice["logprobs"])
                time.sleep(0.003)
    assert tokens == usage["completion_tokens"] == 600
    pair.wait_idle()


def leave_soon(cluster: Cluster, number: int, dice: random.Random) -> None:
    """A client that goes away after a while, in any state of its request."""
    body = {"model": cluster.model, "prompt": prompt(number, 20 + number % 300), "max_tokens": 150, "stream": True}
    body |= {"n": dice.choice((1, 1, 4))}
    patience = httpx.Timeout(30, read=dice.choice((0.01, 0.05, 0.2)))
    chunks = dice.choice((0, 1, 5))
    try:
        with httpx.stream("POST", cluster.url + "/v1/completions", json=body, timeout=patience) as response:
            for _ in zip(range(chunks), response.iter_lines(), strict=False):
                pass
    except httpx.TimeoutException:
        pass


def test_after_a_storm_of_clients_that_leave_all_is_as_before(pair: Cluster, alone: Cluster) -> None:
    dice = random.Random(4)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: leave_soon(pair, number, dice), range(80)))
    pair.wait_idle()
    assert pair.metric("tandem_kv_credits_waiting") == 0
    ends = time.monotonic() + 60
    while pair.metric("tandem_router_reservations"):  # the router counts once a second
        assert time.monotonic() < ends, "load stays booked that nobody has"
        time.sleep(0.1)
    assert ask(pair, prompt(9, 90)) == ask(alone, prompt(9, 90))


def test_a_prefill_worker_that_is_told_to_stop_lets_its_transfers_land(pair: Cluster, alone: Cluster) -> None:
    """SIGTERM under load: none fails, and its place is taken by another."""
    first = next(UNASKED)
    prompts = [prompt(first + n, 40 + 11 * n) for n in range(16)]
    expected = [ask(alone, tokens) for tokens in prompts]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, pair, tokens) for tokens in prompts]
        while sum(future.done() for future in running) < 2:
            time.sleep(0.005)
        must_hit(not all(future.done() for future in running), "all had ended")
        os.kill(pair.pids["prefill-0"], signal.SIGTERM)
        assert [future.result() for future in running] == expected
    wait_for_prefill(pair)
    pair.wait_idle()


def test_clients_leave_and_then_the_prefill_worker_dies(pair: Cluster, alone: Cluster) -> None:
    """Blocks whose writer can say nothing any more come back."""
    dice = random.Random(5)
    decode = pair.pids["decode-0"]
    for round_ in range(2):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            leaving = [pool.submit(leave_soon, pair, 100 * round_ + number, dice) for number in range(16)]
            time.sleep(0.1)
            os.kill(pair.pids["prefill-0"], signal.SIGKILL)
            for future in leaving:
                future.result()
        pair.wait_idle()  # a lease, and some
        wait_for_prefill(pair)
    os.kill(decode, 0)  # it has lived through all of it
    assert ask(pair, prompt(10, 90)) == ask(alone, prompt(10, 90))


def wait_for_prefill(cluster: Cluster) -> None:
    """Until the supervisor has started another and the router knows it."""
    event = cluster.wait_event("restarted", 120)
    cluster.pids[str(event["name"])] = int(str(event["pid"]))
    deadline = time.monotonic() + 60
    while cluster.metric("tandem_router_workers") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = committed(cluster)
    while committed(cluster) == before:
        assert time.monotonic() < deadline
        ask(cluster, prompt(int(before) + 20_000, 40))
