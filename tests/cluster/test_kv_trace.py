"""`tandem kv trace` against a running cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

PROMPT = [(7 * i) % 40_000 + 10 for i in range(100)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with a tiny model of three layers, prompts in chunks of 64."""
    folder = tmp_path_factory.mktemp("trace")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    running = start_cluster(folder, *options, "--max-batched-tokens", "64", "--connector", "tcp", model=model)
    yield running
    stop_cluster(running)


def complete(cluster: Cluster, prompt: list[int], **more: Any) -> str:
    """Asks; the response's id."""
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(cluster.url + "/v1/completions", json=body | more, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def tandem(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "140"})


def traces(cluster: Cluster, *request: str) -> list[dict[str, Any]]:
    done = tandem(cluster, "kv", "trace", *request, "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_every_layer_of_every_chunk_is_there_in_order(pair: Cluster) -> None:
    response = complete(pair, PROMPT)
    (trace,) = traces(pair, response)
    assert trace["transfer"] == f"{response}-0/0" and trace["connector"] == "tcp"
    assert (trace["prefill"], trace["decode"]) == ("prefill-0", "decode-0")
    assert [(push["tokens"], push["layer"]) for push in trace["pushes"]] == [
        (tokens, layer) for tokens in (64, 100) for layer in range(3)
    ]
    assert trace["bytes"] == sum(push["bytes"] for push in trace["pushes"]) > 0
    events = [(event["worker"], event["event"]) for event in trace["events"]]
    decode = [event for worker, event in events if worker == "decode-0"]
    assert decode == ["arrived", "linked", "reserved", "first token", "landed", "verified", "committed"]
    assert [event for worker, event in events if worker == "prefill-0"] == [
        "ordered",
        "last layer",
        "first token",
        "sent",
        "source freed",
    ]
    times = {event["event"]: event["ms"] for event in trace["events"]}
    assert times["arrived"] == 0 <= times["reserved"] <= times["ordered"] <= trace["pushes"][0]["ms"]
    assert trace["pushes"][-1]["ms"] == times["last layer"] < times["first token"]
    assert times["last layer"] <= times["sent"] <= times["landed"] <= times["verified"] <= times["committed"]
    assert trace["exposed_ms"] == pytest.approx(times["committed"] - times["last layer"], abs=0.01)
    assert trace["clock_error_ms"] == 0


def test_the_metric_says_the_same(pair: Cluster) -> None:
    """Times of all transfers so far, from the last layer to the commit."""
    before = (
        pair.metric("tandem_kv_transfer_exposed_seconds_sum"),
        pair.metric("tandem_kv_transfer_exposed_seconds_count"),
    )
    (trace,) = traces(pair, complete(pair, [id + 50 for id in PROMPT]))
    deadline = time.monotonic() + 60
    while pair.metric("tandem_kv_transfer_exposed_seconds_count") == before[1]:
        assert time.monotonic() < deadline
    seconds = pair.metric("tandem_kv_transfer_exposed_seconds_sum") - before[0]
    # The way of the word that all was sent is in one and not in the other.
    assert 0 < seconds <= trace["exposed_ms"] / 1000 + 1e-3


def test_choices_are_transfers_of_their_own_and_the_latest_needs_no_id(pair: Cluster) -> None:
    response = complete(pair, [id + 100 for id in PROMPT], n=2, temperature=1, seed=1)
    assert {trace["transfer"] for trace in traces(pair, response)} == {f"{response}-{number}/0" for number in (0, 1)}
    (latest,) = traces(pair)
    assert latest["transfer"].startswith(response)


def test_picture(pair: Cluster) -> None:
    response = complete(pair, [id + 200 for id in PROMPT])
    done = tandem(pair, "kv", "trace", response)
    assert done.returncode == 0, done.stderr
    assert "prefill-0 → decode-0" in done.stdout and "over tcp" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "layer 2, to token 100" in line]
    assert len(rows) == 1 and ("█" in rows[0] or "░" in rows[0])
    assert "exposed: " in done.stdout and done.stdout.count("committed") == 1


def test_mistakes(pair: Cluster) -> None:
    done = tandem(pair, "kv", "trace", "cmpl-of-nobody")
    assert done.returncode == 78 and "'cmpl-of-nobody'" in done.stderr and done.stderr.count("\n") == 1
    elsewhere = Cluster(pair.process, "http://127.0.0.1:1", pair.log, pair.model)
    done = tandem(elsewhere, "kv", "trace")
    assert done.returncode == 78 and "no cluster here at http://127.0.0.1:1" in done.stderr


def test_what_failed_is_told(pair: Cluster) -> None:
    """A prefill worker that is stopped: the decode worker computes the prompt, and remembers why."""
    complete(pair, PROMPT)  # the two are linked
    os.kill(pair.pids["prefill-0"], signal.SIGSTOP)
    try:
        response = complete(pair, [id + 300 for id in PROMPT])
        done = tandem(pair, "kv", "trace", response)
        (trace,) = traces(pair, response)
    finally:
        os.kill(pair.pids["prefill-0"], signal.SIGCONT)
    assert done.returncode == 0 and "(gone) → decode-0" in done.stdout
    events = {event["event"]: event["detail"] for event in trace["events"]}
    assert "committed" not in events and trace["exposed_ms"] is None
    assert "the sender" in events["recomputed"]
