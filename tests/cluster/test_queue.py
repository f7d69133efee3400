"""A cluster that is full: tenants share it, priorities count, too many hear 429, and nothing is left over."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

from services.api_keys import digest_of

FLOOD, QUIET = "the key of one that floods", "the key of another"
KEYS = [("flood", FLOOD), ("other", QUIET)]
KV_BLOCKS = 36  # 576 tokens: for two requests at once
PROMPT, OUTPUT = 150, 120  # tokens
MAX_QUEUE = 12
UNASKED = itertools.count(1000)  # first tokens of prompts that no try has asked yet


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("queue")
    keys = folder / "keys.toml"
    entry = '[[key]]\nname = "{}"\nhash = "sha256:{}"\nmin_priority = -1\n'
    keys.write_text("".join(entry.format(name, digest_of(key).hex()) for name, key in KEYS))
    running = start_cluster(
        folder,
        *("--prefill", "1", "--decode", "1", "--threads", "1", "--dummy-seed", "1", "--fetch-tokens", "0"),
        *("--decode-setting", f"kv_blocks={KV_BLOCKS}", "--max-model-len", "560", "--max-queue", str(MAX_QUEUE)),
        model=str(tiny_model(folder / "tiny")),
        env={"TANDEM_API_KEYS_FILE": str(keys)},
        api_key=QUIET,
    )
    yield running
    stop_cluster(running)


class Clients:
    """Requests under way, each on a thread; in which order answers were complete, and what was refused."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(64)
        self.answered: list[str] = []
        self.refused: list[httpx.Response] = []
        self.ids: dict[str, str] = {}

    def send(self, name: str, key: str = FLOOD, priority: int = 0) -> None:
        """Asks a prompt of its own."""
        self._pool.submit(self._ask, name, key, priority, next(UNASKED))

    def _ask(self, name: str, key: str, priority: int, first: int) -> None:
        body = {"model": self._cluster.model, "prompt": [first, *range(500, 499 + PROMPT)], "max_tokens": OUTPUT}
        body |= {"ignore_eos": True, "priority": priority}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{self._cluster.url}/v1/completions", json=body, headers=headers, timeout=120)
        with self._lock:
            if answer.status_code == 200:
                self.answered.append(name)
                self.ids[name] = answer.json()["id"]
            else:
                self.refused.append(answer)

    def flood(self) -> None:
        """As many as fill the cluster and its queue, so that some are refused."""
        held = self._cluster.metric("tandem_router_queue_requests")
        assert held == 0
        sent, deadline = 0, time.monotonic() + 60
        while held < MAX_QUEUE - 4:
            assert time.monotonic() < deadline
            while sent - len(self.answered) < MAX_QUEUE:  # at once: one by one they would be answered meanwhile
                self.send("flood")
                sent += 1
            held = self._cluster.metric("tandem_router_queue_requests")

    def wait(self) -> None:
        """Until all have an answer."""
        self._pool.shutdown(wait=True)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing_is_left(cluster: Cluster) -> None:
    cluster.wait_idle()
    eventually(lambda: cluster.metric("tandem_router_reservations") == 0)
    assert cluster.metric("tandem_router_queue_requests") == cluster.metric("tandem_router_queue_tokens") == 0


def test_a_tenant_that_floods_does_not_keep_another_waiting(cluster: Cluster) -> None:
    clients = Clients(cluster)
    urgent = cluster.metric("tandem_router_queue_seconds_count", priority="high")
    clients.flood()
    clients.send("other", QUIET)
    clients.send("urgent", FLOOD, -1)
    clients.wait()
    assert not clients.refused
    behind = clients.answered[clients.answered.index("other") :].count("flood")
    assert behind >= MAX_QUEUE - 6  # most of those that waited before it came
    assert clients.answered[clients.answered.index("urgent") :].count("flood") >= behind - 3
    explained = subprocess.run(
        [sys.executable, "-m", "services.cli", "router", "explain", clients.ids["other"], "--url", cluster.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "in the queue" in explained.stdout, explained
    assert cluster.metric("tandem_router_queue_seconds_count", priority="high") == urgent + 1
    nothing_is_left(cluster)


def test_too_many_hear_when_to_come_back(cluster: Cluster) -> None:
    clients, before = Clients(cluster), cluster.metric("tandem_router_shed_total", reason="queue full")
    for _ in range(30):
        clients.send("flood")
    clients.wait()
    assert len(clients.answered) >= MAX_QUEUE and clients.refused
    for answer in clients.refused:
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) < 300
        assert answer.json()["error"]["code"] == "overloaded"
    assert cluster.metric("tandem_router_shed_total", reason="queue full") == before + len(clients.refused)
    nothing_is_left(cluster)


def test_clients_that_leave_leave_the_queue(cluster: Cluster) -> None:
    clients, turns = Clients(cluster), cluster.metric("tandem_router_queue_seconds_count", priority="low")
    clients.flood()
    body = {"model": cluster.model, "prompt": [7, *range(500, 499 + PROMPT)], "max_tokens": OUTPUT, "priority": 5}
    patience = httpx.Timeout(60, read=0.3)
    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{cluster.url}/v1/completions",
                json=body | {"stream": stream},
                headers=cluster.headers,
                timeout=patience,
            )
    clients.wait()
    assert set(clients.answered) == {"flood"}
    assert cluster.metric("tandem_router_queue_seconds_count", priority="low") == turns  # they never got one
    nothing_is_left(cluster)
