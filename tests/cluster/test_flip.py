"""Other roles for workers of a running cluster: `tandem flip`, `/admin/role`."""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.clients import Clients
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import kill, run_streams
from cluster.tiny import tiny_model
from faults_hit import must_hit

UNASKED = itertools.count(0, 1000)  # makes prompts that no try has asked yet
PROMPT = [(7 * i) % 40_000 + 10 for i in range(400)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers with a tiny model."""
    folder = tmp_path_factory.mktemp("flip")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    running = start_cluster(folder, "--prefill", "2", "--decode", "2", *options, model=model)
    yield running
    stop_cluster(running)


@pytest.fixture(autouse=True)
def as_it_was(four: Cluster) -> Iterator[None]:
    """Each test begins with the roles that the workers were started with."""
    yield
    for name, role in sorted(roles(four).items()):  # those that decode first
        if role != name.partition("-")[0]:
            assert flip(four, name, name.partition("-")[0]).status_code == 200


def members(cluster: Cluster) -> dict[str, dict[str, Any]]:
    status = httpx.get(cluster.admin + "/admin/status", timeout=30).json()
    return {member["name"]: member for member in status["members"] if "-" in member["name"]}


def roles(cluster: Cluster) -> dict[str, str]:
    return {name: member["role"] for name, member in members(cluster).items()}


def flip(cluster: Cluster, worker: str, role: str, **more: object) -> httpx.Response:
    return httpx.post(cluster.admin + "/admin/role", json={"worker": worker, "role": role, **more}, timeout=90)


def answer(cluster: Cluster, prompt: list[int] = PROMPT) -> tuple[list[str], int]:
    """Tokens, and how many of the prompt's were cached."""
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    response = httpx.post(cluster.url + "/v1/completions", json=body | {"temperature": 0}, timeout=120)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["logprobs"]["tokens"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_streams_of_a_worker_that_takes_another_role_go_on_elsewhere_token_by_token(four: Cluster) -> None:
    numbers, length = range(100, 106), 200
    expected = asyncio.run(run_streams(four, numbers, length))
    before = members(four)
    moved: dict[str, int] = {}

    def change() -> None:
        """The busiest: all of the prompts may be cached on the same worker."""
        requests = {name: four.metric("tandem_worker_requests", worker=name) for name in ("decode-0", "decode-1")}
        worker = max(requests, key=lambda name: requests[name])
        moved[worker] = flip(four, worker, "prefill", finish_seconds=0).json()["moved"]

    streams = asyncio.run(run_streams(four, numbers, length, change))
    assert [stream.error for stream in streams] == [None] * len(numbers)
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in expected]
    ((worker, count),) = moved.items()
    must_hit(count > 0, "it had nothing")
    assert members(four)[worker]["role"] == "prefill"
    assert members(four)[worker]["incarnation"] == before[worker]["incarnation"]
    assert four.metric("tandem_router_workers", role="prefill") == 3
    four.wait_idle()


def test_nothing_fails_while_each_role_becomes_each(four: Cluster) -> None:
    with Clients(four) as clients:
        for worker, role in [
            ("prefill-1", "decode"),
            ("prefill-1", "aggregated"),
            ("decode-0", "prefill"),
            ("prefill-1", "prefill"),
            ("decode-0", "decode"),
        ]:
            done = flip(four, worker, role, finish_seconds=1)
            assert done.status_code == 200 and done.json()["role"] == role, done.text
            must_hit(done.json()["seconds"] < 10, f"it took {done.json()['seconds']:.1f} s")
            clients.wait(6)
    assert set(clients.statuses) == {200}


def test_streams_may_finish_first(four: Cluster) -> None:
    seconds: list[dict[str, Any]] = []

    def change() -> None:
        seconds.append(flip(four, "decode-1", "prefill", finish_seconds=60).json())

    streams = asyncio.run(run_streams(four, range(4), 150, change))
    assert all(stream.finish == "length" and stream.error is None for stream in streams)
    assert seconds[0]["moved"] == 0


def test_what_was_cached_before_is_a_hit_in_the_new_role(four: Cluster) -> None:
    first = next(UNASKED)
    prompt = [(13 * i + first) % 40_000 + 10 for i in range(400)]
    expected, cached = answer(four, prompt)
    assert cached == 0
    computed = {
        name: four.metric("tandem_prompt_tokens_total", worker=name, source="computed")
        for name in ("prefill-0", "prefill-1")
    }
    # Whoever has it decodes now, and the prompt is decoded again by anybody.
    for name in ("prefill-0", "prefill-1"):
        assert flip(four, name, "aggregated").status_code == 200
    for name in ("decode-0", "decode-1"):
        assert flip(four, name, "prefill").status_code == 200
    again, cached = answer(four, prompt)
    assert again == expected and cached >= 384
    for name, before in computed.items():
        assert four.metric("tandem_prompt_tokens_total", worker=name, source="computed") - before < 32


def test_a_former_prefill_worker_takes_kv_and_a_former_decode_worker_gives_it(four: Cluster) -> None:
    assert flip(four, "prefill-0", "decode").status_code == 200
    assert flip(four, "prefill-1", "decode").status_code == 200
    assert flip(four, "decode-0", "prefill").status_code == 200
    assert flip(four, "decode-1", "prefill").status_code == 200
    before = four.metric("tandem_kv_transfers_total", outcome="committed")
    for number in range(4):
        first = next(UNASKED)
        answer(four, [(37 * number + 11 * i + first) % 40_000 + 10 for i in range(200)])
    assert four.metric("tandem_kv_transfers_total", outcome="committed") - before >= 4


def test_what_cannot_be_is_refused_and_says_why(four: Cluster) -> None:
    assert flip(four, "nobody", "decode").status_code == 404
    assert flip(four, "decode-0", "gateway").status_code == 400
    same = flip(four, "decode-0", "decode")
    assert same.status_code == 200 and same.json()["before"] == "decode" and same.json()["seconds"] == 0
    assert flip(four, "decode-0", "prefill").status_code == 200
    last = flip(four, "decode-1", "prefill")
    assert last.status_code == 409 and "the last worker that decodes" in last.json()["error"]["message"]
    assert roles(four)["decode-1"] == "decode"

    httpx.post(four.admin + "/admin/drain", json={"workers": ["prefill-0"]}, timeout=30)
    draining = flip(four, "prefill-0", "decode")
    assert draining.status_code == 409 and "draining" in draining.json()["error"]["message"]
    httpx.post(four.admin + "/admin/undrain", json={"workers": ["prefill-0"]}, timeout=30)

    command = [sys.executable, "-m", "services.cli", "flip", "decode-1", "prefill", "--url", four.url]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert refused.returncode != 0 and "keeps its role" in refused.stderr
    forced = subprocess.run([*command, "--force"], capture_output=True, text=True, timeout=90)
    assert forced.returncode == 0 and forced.stdout.startswith("decode-1: decode to prefill in ")
    health = httpx.get(four.url + "/health", timeout=30)
    assert health.status_code == 503
    assert flip(four, "decode-1", "decode").status_code == 200
    answer(four)


def test_who_starts_again_has_the_role_of_its_start(four: Cluster) -> None:
    assert flip(four, "decode-1", "prefill").status_code == 200
    old = members(four)["decode-1"]["incarnation"]
    kill(four, "decode-1")
    deadline = time.monotonic() + 60
    while (found := members(four).get("decode-1")) is None or found["incarnation"] == old:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found["role"] == "decode"
    answer(four)
