"""Workers are killed under load: requests end token-exactly, and the cluster is whole again by itself."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import kill, run_streams, state_of
from cluster.tiny import tiny_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers with a tiny model that takes its time."""
    folder = tmp_path_factory.mktemp("faults")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    running = start_cluster(folder, "--prefill", "2", "--decode", "2", *options, model=model)
    yield running
    stop_cluster(running)


def body(cluster: Cluster, number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": cluster.model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(60 + number)],
        "max_tokens": max_tokens,
        "temperature": 0.9 if number % 2 else 0,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
    }


def ask(cluster: Cluster, number: int, max_tokens: int = 300, salt: str = "") -> list[str]:
    request = body(cluster, number, max_tokens) | ({"cache_salt": salt} if salt else {})
    answer = httpx.post(cluster.url + "/v1/completions", json=request, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return list(choice["logprobs"]["tokens"])


def wait_whole(cluster: Cluster, workers: int) -> None:
    """Until all workers are registered again."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if cluster.metric("tandem_router_workers") == workers:
            return
        time.sleep(0.2)
    pytest.fail(f"the cluster is not whole again; log:\n{cluster.log.read_text()[-4000:]}")


async def test_streams_go_on_when_their_decode_worker_is_killed(pair: Cluster) -> None:
    """8 of 8, token by token, some of them moved to the other worker."""
    expected = [stream.tokens for stream in await run_streams(pair, range(8), 400)]
    pair.wait_idle()
    moved = pair.metric("tandem_requests_moved_total")
    streams = await run_streams(pair, range(8), 400, lambda: kill(pair, "decode-0"))
    assert [(stream.error, stream.finish) for stream in streams] == [(None, "length")] * 8
    assert [stream.tokens for stream in streams] == expected
    assert all(len(tokens) == 400 for tokens in expected)
    wait_whole(pair, 4)
    pair.wait_idle()
    assert pair.metric("tandem_requests_moved_total") - moved >= 2


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_killed_worker_loses_nothing(pair: Cluster, victim: str) -> None:
    expected = [ask(pair, number) for number in range(8)]
    pair.wait_idle()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, pair, number % 8) for number in range(16)]
        time.sleep(0.3)
        assert sum(not future.done() for future in running) > 8, "the load ended before the fault"
        kill(pair, victim)
        results = [future.result() for future in running]
    for number, result in enumerate(results):
        assert result == expected[number % 8]
    wait_whole(pair, 4)
    pair.wait_idle()


def test_all_decode_workers_gone_is_an_error_in_time_and_heals(pair: Cluster) -> None:
    """A stopped (not killed) pair of decode workers cannot be seen as dead at once; killed ones can."""
    expected = ask(pair, 3)
    for name in ("decode-0", "decode-1"):
        os.kill(pair.pids[name], signal.SIGKILL)
    started = time.monotonic()
    answer = httpx.post(pair.url + "/v1/completions", json=body(pair, 3, 300), timeout=60)
    took = time.monotonic() - started
    if answer.status_code != 200:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["message"]
        assert took < 10
    else:
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
    for _ in range(2):
        event = pair.wait_event("restarted", 30)
        pair.pids[str(event["name"])] = int(str(event["pid"]))
    wait_whole(pair, 4)
    assert ask(pair, 3) == expected
    pair.wait_idle()


def test_client_gone_stops_the_work(pair: Cluster) -> None:
    pair.wait_idle()
    for number in range(6):
        request = body(pair, number, 1500) | {"stream": True, "n": 2}
        with httpx.stream("POST", pair.url + "/v1/completions", json=request, timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    break  # leaves the stream after the first piece
    pair.wait_idle(2.0)


RECOMPUTED = {"outcome": "recomputed"}


@contextlib.contextmanager
def stopped(cluster: Cluster, name: str) -> Iterator[None]:
    """SIGSTOP, proved; SIGCONT."""
    pid = cluster.pids[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        while state_of(pid) != "T":
            time.sleep(0.001)
        yield
        assert cluster.pids[name] == pid and state_of(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_gateway_that_is_silent_for_longer_than_its_lease_loses_no_stream(pair: Cluster) -> None:
    """Workers take it for gone and abort its requests; when it goes on it notices, and has them computed on."""
    pair.wait_idle()
    before = pair.metric("tandem_requests_moved_total")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, pair, number, 1500, "silent") for number in range(4)]
        time.sleep(0.5)
        with stopped(pair, "gateway"):
            time.sleep(3.6)
        results = [future.result() for future in running]
    pair.wait_idle(10)
    assert pair.metric("tandem_requests_moved_total") > before, "nothing was aborted"
    assert [ask(pair, number, 1500, "alone") for number in range(2)] == results[:2]
    pair.wait_idle()


# Shorter and longer than the leases of transfers and members.
@pytest.mark.parametrize(("victim", "seconds"), [("prefill-0", 1.0), ("prefill-0", 8.0), ("decode-0", 8.0)])
def test_worker_stopped_in_the_middle_of_transfers(pair: Cluster, victim: str, seconds: float) -> None:
    """Its requests are computed elsewhere; when it goes on it changes no token, and no block is left on any side."""
    salt = f"{victim} {seconds}"  # nothing of these prompts is cached
    numbers = range(1300, 1318)  # long ones
    signs = ("tandem_requests_moved_total", {}) if victim == "decode-0" else ("tandem_kv_transfers_total", RECOMPUTED)
    before = pair.metric(signs[0], **signs[1])
    with concurrent.futures.ThreadPoolExecutor(18) as pool:
        running = [pool.submit(ask, pair, number, 60, salt) for number in numbers]
        time.sleep(0.25)
        assert sum(not future.done() for future in running) > 6, "the load ended before the fault"
        with stopped(pair, victim):
            time.sleep(seconds)
        results = [future.result() for future in running]
    wait_whole(pair, 4)
    pair.wait_idle(10)
    if seconds > 5:
        assert pair.metric(signs[0], **signs[1]) > before, "nothing was under way"
    assert [ask(pair, number, 60, "another") for number in numbers] == results
    assert [ask(pair, number, 60, salt) for number in numbers[:6]] == results[:6]  # with what is cached now
    pair.wait_idle()
