"""The connector between two workers fails under load: answers stay what they are, and no prompt is computed twice."""

import concurrent.futures
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.process_sockets import cut_streams, sockets_of
from cluster.tiny import tiny_model

from kv_transfer.connectors.tcp_sender import NUM_STREAMS

REQUESTS = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("fallback")
    model = str(tiny_model(folder / "tiny"))
    # Small steps: a prompt takes many of them.
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--max-batched-tokens", "32")
    running = start_cluster(folder, *options, "--local-prefill-tokens", "0", model=model)
    yield running
    stop_cluster(running)


def ask_all(cluster: Cluster, salt: str) -> list[list[str]]:
    """Tokens of all requests. Another salt: no block of an earlier asking is used again."""

    def ask(number: int) -> list[str]:
        body = {
            "model": cluster.model,
            "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(300 + number)],
            "max_tokens": 8,
            "temperature": 0.9 if number % 2 else 0,
            "seed": number,
            "ignore_eos": True,
            "logprobs": 0,
            "cache_salt": salt,
        }
        answer = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["logprobs"]["tokens"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(REQUESTS)))


def landed(cluster: Cluster, connector: str) -> float:
    return cluster.metric("tandem_kv_transfer_bytes_total", connector=connector)


def fallbacks(cluster: Cluster, failed: str, following: str) -> float:
    return cluster.metric("tandem_kv_connector_fallbacks_total", failed=failed, next=following)


def during(cluster: Cluster, salt: str, strike: Callable[[], bool]) -> list[list[str]]:
    """Asks for all, and strikes under way until it is said to be enough."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, cluster, salt)
        enough = False
        while not asked.done() and not enough:
            time.sleep(0.05)
            enough = strike()
        return asked.result()


def segment(pid: int) -> Path:
    names = re.findall(r"/dev/shm/tandem-kv-[0-9a-f]{32}", Path(f"/proc/{pid}/maps").read_text())
    return Path(names[0])


def test_transfers_go_on_over_the_next_connector_and_return_to_the_better_one(cluster: Cluster) -> None:
    expected = ask_all(cluster, "calm")
    assert landed(cluster, "shared_memory") and not landed(cluster, "tcp")

    (decode,) = (pid for name, pid in cluster.pids.items() if name.startswith("decode"))
    (prefill,) = (pid for name, pid in cluster.pids.items() if name.startswith("prefill"))
    memory = segment(decode)
    size = memory.stat().st_size

    def grow() -> bool:
        os.truncate(memory, size + 1)  # it is not what the prefill worker had mapped any more
        return fallbacks(cluster, "shared_memory", "tcp") > 0

    assert during(cluster, "without shared memory", grow) == expected
    assert fallbacks(cluster, "shared_memory", "tcp") and landed(cluster, "tcp")

    try:
        next(iter(sockets_of(prefill)))
    except PermissionError as error:
        pytest.skip(str(error))
    cuts = 0

    def cut() -> bool:
        nonlocal cuts
        cuts += cut_streams(prefill, NUM_STREAMS)
        return fallbacks(cluster, "tcp", "zmq") > 0

    ends = time.monotonic() + 60
    while not fallbacks(cluster, "tcp", "zmq"):
        assert time.monotonic() < ends, "no transfer was ever cut in the middle"
        assert during(cluster, f"cut {time.monotonic()}", cut) == expected
    assert cuts and landed(cluster, "zmq")

    os.truncate(memory, size)
    before, ends = landed(cluster, "shared_memory"), time.monotonic() + 60
    while landed(cluster, "shared_memory") == before:
        assert time.monotonic() < ends, "the better connector is not tried again"
        assert ask_all(cluster, f"again {time.monotonic()}") == expected
        time.sleep(0.5)
    assert cluster.metric("tandem_kv_transfers_total", outcome="recomputed") == 0
    cluster.wait_idle()
    said = cluster.log.read_text()
    assert "KV connector failed" in said and "another size than before" in said
