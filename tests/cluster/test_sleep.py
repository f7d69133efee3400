"""`tandem sleep` and `tandem wake` against a running cluster."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

PROMPT = [(7 * i) % 40_000 + 10 for i in range(100)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with a tiny model."""
    folder = tmp_path_factory.mktemp("sleep")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    running = start_cluster(folder, "--prefill", "1", "--decode", "1", *options, model=model)
    yield running
    stop_cluster(running)


def tandem(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, str], str]:
    """(exit status, what is said of each worker, stderr) of a command."""
    command = [sys.executable, "-m", "services.cli", *arguments, "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    lines = (line.split(": ", 1) for line in done.stdout.splitlines())
    return done.returncode, {name: said for name, said in lines}, done.stderr


def post(cluster: Cluster, max_tokens: int = 40) -> httpx.Response:
    body: dict[str, Any] = {"model": cluster.model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(cluster.url + "/v1/completions", json=body | {"logprobs": 0, "ignore_eos": True}, timeout=120)


def tokens(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["logprobs"]["tokens"])


def wait_for(cluster: Cluster, status: int) -> None:
    """Until the gateway knows whether workers are awake."""
    deadline = time.monotonic() + 60
    while httpx.get(cluster.url + "/health", timeout=30).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kv_memory(cluster: Cluster, name: str) -> int:
    """Bytes that a worker's KV pool takes."""
    pid = cluster.pids[name]
    if name.startswith("decode"):
        links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
        (segment,) = {link for link in links if "/dev/shm/tandem-kv-" in link}
        return os.stat(segment).st_blocks * 512
    sizes = re.findall(r"^Rss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, sizes)) << 10


def test_sleep_and_wake(pair: Cluster) -> None:
    expected = tokens(post(pair))
    pair.wait_idle()
    before = {name: kv_memory(pair, name) for name in ("prefill-0", "decode-0")}
    assert pair.metric("tandem_kv_blocks", state="cached") > 0

    code, said, _ = tandem(pair, "sleep")
    assert code == 0 and all(re.fullmatch(r"asleep after [\d.]+ s", line) for line in said.values()), said
    assert set(said) == {"prefill-0", "decode-0"}
    for name, size in before.items():
        assert size - kv_memory(pair, name) > 60 << 20, name
    wait_for(pair, 503)
    deadline = time.monotonic() + 60
    while pair.metric("tandem_kv_blocks", state="cached") or pair.metric("tandem_router_index_blocks"):
        assert time.monotonic() < deadline, "the router believes in caches that are gone"
        time.sleep(0.1)
    assert httpx.get(pair.url + "/health", timeout=30).json() == {"status": "asleep"}
    started = time.monotonic()
    refused = post(pair)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert "asleep" in refused.json()["error"]["message"] and time.monotonic() - started < 4
    assert tandem(pair, "sleep", "decode-0") == (0, {"decode-0": "asleep already"}, "")

    assert tandem(pair, "wake", "decode-0")[0] == 0
    wait_for(pair, 200)
    committed = pair.metric("tandem_kv_transfers_total", outcome="committed")
    assert tokens(post(pair)) == expected  # the prefill worker sleeps: the decode worker computes the prompt
    assert pair.metric("tandem_kv_transfers_total", outcome="committed") == committed
    code, said, _ = tandem(pair, "wake")
    assert code == 0 and said["decode-0"] == "awake already" and said["prefill-0"].startswith("awake after")
    assert tandem(pair, "sleep", "decode-0")[0] == tandem(pair, "wake", "decode-0")[0] == 0  # forgets its cache
    wait_for(pair, 200)
    assert tokens(post(pair)) == expected
    assert pair.metric("tandem_kv_transfers_total", outcome="committed") == committed + 1
    pair.wait_idle()


def test_busy_workers_refuse_or_finish_first(pair: Cluster) -> None:
    assert tandem(pair, "wake")[0] == 0  # a try before this one may have left them asleep
    wait_for(pair, 200)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(pair, 1500)))
    asking.start()
    deadline = time.monotonic() + 60
    while not pair.metric("tandem_worker_requests", state="running"):
        assert time.monotonic() < deadline
    code, said, _ = tandem(pair, "sleep", "decode-0")
    assert asking.is_alive(), "the request ended too early to tell"
    assert code == 1 and said == {"decode-0": "refuses: 1 requests are under way: give --drain to wait"}
    code, said, _ = tandem(pair, "sleep", "decode-0", "--drain")
    assert code == 0 and said["decode-0"].startswith("asleep after")
    asking.join(120)
    assert len(tokens(answers[0])) == 1500
    assert tandem(pair, "wake")[0] == 0
    wait_for(pair, 200)
    assert len(tokens(post(pair))) == 40
    pair.wait_idle()


def test_mistakes(pair: Cluster) -> None:
    code, said, error = tandem(pair, "sleep", "decode-7")
    assert (code, said) == (
        78,
        {},
    ) and error == "error: there is no worker 'decode-7'; there are: decode-0, prefill-0\n"
    elsewhere = Cluster(pair.process, "http://127.0.0.1:1", pair.log, pair.model)
    code, said, error = tandem(elsewhere, "wake")
    assert (code, said) == (78, {}) and "no cluster here at http://127.0.0.1:1" in error
