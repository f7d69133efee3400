"""Workers are killed under load: requests end token-exactly, and the cluster is whole again by itself."""

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import kill, run_streams
from cluster.tiny import tiny_model
from faults_hit import must_hit
from supervised import state
from typer.testing import CliRunner

from services.cli import app


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers with a tiny model that takes its time."""
    folder = tmp_path_factory.mktemp("faults")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    patient = {"TANDEM_DRAIN_SECONDS": "60"}  # streams may take their time on a machine under load
    running = start_cluster(folder, "--prefill", "2", "--decode", "2", *options, model=model, env=patient)
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


def ask_all(cluster: Cluster, numbers: range, max_tokens: int = 300, salt: str = "") -> list[list[str]]:
    """At once: batches take less time than one after the other."""
    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda number: ask(cluster, number, max_tokens, salt), numbers))


def wait_whole(cluster: Cluster, workers: int) -> None:
    """Until all workers are registered again."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if cluster.metric("tandem_router_workers") == workers:
            return
        time.sleep(0.2)
    pytest.fail(f"the cluster is not whole again; log:\n{cluster.log.read_text()[-4000:]}")


def busiest(cluster: Cluster) -> str:
    """A decode worker that has requests: all may have been placed on the same one."""
    requests = {name: cluster.metric("tandem_worker_requests", worker=name) for name in ("decode-0", "decode-1")}
    return max(requests, key=lambda name: requests[name])


async def test_streams_go_on_when_their_decode_worker_is_killed(pair: Cluster) -> None:
    """All of them, token by token, some of them moved to the other worker."""
    expected = [stream.tokens for stream in await run_streams(pair, range(6), 300)]
    pair.wait_idle()
    moved = pair.metric("tandem_requests_moved_total")
    streams = await run_streams(pair, range(6), 300, lambda: kill(pair, busiest(pair)))
    assert [(stream.error, stream.finish) for stream in streams] == [(None, "length")] * 6
    assert [stream.tokens for stream in streams] == expected
    assert all(len(tokens) == 300 for tokens in expected)
    wait_whole(pair, 4)
    pair.wait_idle()
    must_hit(pair.metric("tandem_requests_moved_total") - moved >= 1, "the killed worker had nothing")


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_killed_worker_loses_nothing(pair: Cluster, victim: str) -> None:
    expected = ask_all(pair, range(8))
    pair.wait_idle()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, pair, number % 8) for number in range(12)]
        time.sleep(0.3)
        must_hit(sum(not future.done() for future in running) > 6, "the load ended before the fault")
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
    answer = httpx.post(pair.url + "/v1/completions", json=body(pair, 3, 300), timeout=120)
    took = time.monotonic() - started
    if answer.status_code != 200:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["message"]
        assert took < 30  # and not at the deadline of the request
    else:
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
    for _ in range(2):
        event = pair.wait_event("restarted", 120)
        pair.pids[str(event["name"])] = int(str(event["pid"]))
    wait_whole(pair, 4)
    assert ask(pair, 3) == expected
    pair.wait_idle()


def test_client_gone_stops_the_work(pair: Cluster) -> None:
    pair.wait_idle()
    before = pair.metric("tandem_generated_tokens_total")
    for number in range(6):
        request = body(pair, number, 1500) | {"stream": True, "n": 2}
        with httpx.stream("POST", pair.url + "/v1/completions", json=request, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    break  # leaves the stream after the first piece
    pair.wait_idle()
    generated = pair.metric("tandem_generated_tokens_total") - before
    assert generated < 6 * 2 * 1500 / 2, "answers were computed for nobody"


RECOMPUTED = {"outcome": "recomputed"}


@contextlib.contextmanager
def stopped(cluster: Cluster, name: str) -> Iterator[None]:
    """SIGSTOP, proved; SIGCONT."""
    pid = cluster.pids[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        while state(pid) != "T":
            time.sleep(0.001)
        yield
        assert cluster.pids[name] == pid and state(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_gateway_that_is_silent_for_longer_than_its_lease_loses_no_stream(pair: Cluster) -> None:
    """Workers take it for gone and abort its requests; when it goes on it notices, and has them computed on."""
    pair.wait_idle()
    before, salt = pair.metric("tandem_requests_moved_total"), f"silent {time.monotonic()}"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, pair, number, 1500, salt) for number in range(2)]
        time.sleep(0.5)
        with stopped(pair, "gateway"):
            time.sleep(5.0)  # the lease is over after 3, and read again each second
        results = [future.result() for future in running]
    pair.wait_idle()
    assert ask(pair, 1, 1500, f"alone {salt}") == results[1]
    pair.wait_idle()
    must_hit(pair.metric("tandem_requests_moved_total") > before, "nothing was aborted")


# Shorter and longer than the leases of transfers and members.
@pytest.mark.parametrize(("victim", "seconds"), [("prefill-0", 1.0), ("prefill-0", 8.0), ("decode-0", 8.0)])
def test_worker_stopped_in_the_middle_of_transfers(pair: Cluster, victim: str, seconds: float) -> None:
    """Its requests are computed elsewhere; when it goes on it changes no token, and no block is left on any side."""
    salt = f"{victim} {seconds} {time.monotonic()}"  # nothing of these prompts is cached
    numbers = range(1300, 1312)  # long ones
    signs = ("tandem_requests_moved_total", {}) if victim == "decode-0" else ("tandem_kv_transfers_total", RECOMPUTED)
    before = pair.metric(signs[0], **signs[1])
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        running = [pool.submit(ask, pair, number, 60, salt) for number in numbers]
        time.sleep(0.25)
        must_hit(sum(not future.done() for future in running) > 4, "the load ended before the fault")
        with stopped(pair, victim):
            time.sleep(seconds)
        results = [future.result() for future in running]
    wait_whole(pair, 4)
    pair.wait_idle()
    met = pair.metric(signs[0], **signs[1]) > before
    assert ask_all(pair, numbers, 60, f"another {salt}") == results
    assert ask_all(pair, numbers[:6], 60, salt) == results[:6]  # with what is cached now
    pair.wait_idle()
    must_hit(met or seconds < 5, "nothing was under way")


def tandem(cluster: Cluster, *arguments: str) -> str:
    """What the command prints; it must succeed."""
    done = CliRunner().invoke(app, [*arguments, "--url", cluster.url])
    assert done.exit_code == 0, done.output
    return done.stdout


def states(cluster: Cluster) -> dict[str, str]:
    """By member, as `tandem status` says."""
    return {view["name"]: view["state"] for view in json.loads(tandem(cluster, "status", "--json"))["members"]}


async def test_a_drained_worker_finishes_its_streams_and_leaves_when_told(pair: Cluster) -> None:
    """It gets nothing new, is taken in again, and ends with streams that go on at another one."""
    wait_whole(pair, 4)
    drained: list[str] = []

    def drain_the_busiest() -> None:
        drained.append(worker := busiest(pair))
        drain(pair, worker)

    streams = await run_streams(pair, range(200, 208), 200, drain_the_busiest)
    (worker,) = drained
    assert [(len(each.tokens), each.finish, each.error) for each in streams] == [(200, "length", None)] * 8
    assert f"{worker}: drained" in tandem(pair, "drain", worker)
    assert states(pair) | {worker: "ready"} == dict.fromkeys([*pair.pids], "ready")
    assert states(pair)[worker] == "draining"
    steps = {"worker": worker, "kind": "decode"}
    idle = pair.metric("tandem_engine_steps_total", **steps)
    for number in range(6):
        ask(pair, number, 10)
    assert pair.metric("tandem_engine_steps_total", **steps) == idle > 0
    assert f"{worker}: takes requests" in tandem(pair, "undrain", worker)
    assert states(pair)[worker] == "ready"
    leave = ("drain", worker, "--leave", "--timeout", "0")
    streams = await run_streams(pair, range(220, 228), 200, lambda: tandem(pair, *leave))
    assert [(len(each.tokens), each.finish, each.error) for each in streams] == [(200, "length", None)] * 8
    exited = pair.wait_event("exited", 120)
    assert (exited["name"], exited["code"]) == (worker, 0)
    pair.pids[worker] = int(str(pair.wait_event("restarted", 120)["pid"]))
    wait_whole(pair, 4)


def drain(cluster: Cluster, worker: str) -> None:
    """Answered at once, whatever is under way."""
    answer = httpx.post(cluster.admin + "/admin/drain", json={"workers": [worker]}, timeout=30)
    (drained,) = answer.raise_for_status().json()["workers"]
    assert drained["name"] == worker and not drained["error"]
    must_hit(drained["under_way"], "it had nothing")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"workers": ["decode-7"]}, 404, "there are: decode-0, decode-1, prefill-0, prefill-1"),
        ({}, 400, "workers"),
        ({"workers": "some"}, 400, "workers"),
        ({"workers": [], "leaves": True}, 400, "leaves"),
    ],
)
def test_who_is_to_drain_is_said(pair: Cluster, body: dict[str, Any], status: int, message: str) -> None:
    answer = httpx.post(pair.admin + "/admin/drain", json=body, timeout=30)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


async def test_a_gateway_that_is_told_to_stop_finishes_its_streams(pair: Cluster) -> None:
    """It takes no connections meanwhile, and another one has its place."""
    wait_whole(pair, 4)

    def stop() -> None:
        os.kill(pair.pids["gateway"], signal.SIGTERM)
        deadline = time.monotonic() + 60
        with contextlib.suppress(httpx.ConnectError):
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.ReadError):  # the kernel had it, and the gateway not yet
                    httpx.get(pair.url + "/live", timeout=30)
            pytest.fail("it takes connections still")

    streams = await run_streams(pair, range(240, 244), 200, stop)
    assert [(len(each.tokens), each.finish, each.error) for each in streams] == [(200, "length", None)] * 4
    exited = pair.wait_event("exited", 120)
    assert (exited["name"], exited["code"]) == ("gateway", 0)
    pair.pids["gateway"] = int(str(pair.wait_event("restarted", 120)["pid"]))
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(pair.url + "/health", timeout=30).status_code == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(ask(pair, 1, 10)) == 10
