"""Real clusters for tests: `tandem up` as a user would run it, on free ports, stopped and checked after."""

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

READY_SECONDS = 240.0
# Where processes get no processor for seconds, all workers may miss their leases at once: requests wait for them.
PATIENT = {"TANDEM_WORKER_WAIT": "20"}


def free_port() -> int:
    """Below the ports that the system hands out, so that no connection takes it meanwhile."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Cluster:
    """A running `tandem up --json`."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    model: str
    events: "queue.Queue[dict[str, object]]" = field(default_factory=queue.Queue)
    pids: dict[str, int] = field(default_factory=dict)
    admin: str = ""  # URL of the admin side
    headers: dict[str, str] = field(default_factory=dict)  # of what the harness itself asks

    def wait_event(self, name: str, timeout: float) -> dict[str, object]:
        """The next event of that name; fails with the log's tail."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None and self.events.empty():
                break
            try:
                event = self.events.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(event.get("pids"), dict):
                self.pids.update(event["pids"])  # type: ignore[arg-type]
            self.admin = str(event.get("admin", self.admin))
            if event.get("event") == name:
                return event
        pytest.fail(f"no event {name!r} in {timeout} s; log:\n{self.log.read_text()[-4000:]}")

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels match."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(self.admin + "/metrics", timeout=30).text
        total = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
                    total += sample.value
        return total

    def wait_least(self, name: str, least: float, **labels: str) -> None:
        """Waits until that sum has come to `least`."""
        deadline = time.monotonic() + 60
        while (value := self.metric(name, **labels)) < least:
            assert time.monotonic() < deadline, f"{name} {labels} stays {value}, not {least}"
            time.sleep(0.02)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Waits until no request runs and no block is active, in transfer or orphaned; fails if that does not come."""
        deadline = time.monotonic() + timeout
        while True:
            busy = {
                "running": self.metric("tandem_requests_running"),
                "active": self.metric("tandem_kv_blocks", state="active"),
                "transfer": self.metric("tandem_kv_blocks", state="transfer"),
                "orphaned": self.metric("tandem_kv_blocks_orphaned"),
            }
            if not any(busy.values()):
                return
            if time.monotonic() > deadline:
                pytest.fail(f"not idle after {timeout} s: {busy}; log:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)


def start_cluster(
    directory: Path,
    *args: str,
    model: str = "smollm2",
    env: dict[str, str] | None = None,
    api_key: str = "",
    within: tuple[str, ...] = (),
) -> Cluster:
    """Starts `tandem up --json` with `args`, by the command `within`, and waits until it is ready."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = directory / "up.log"
    up = (sys.executable, "-m", "services.cli", "up")
    process = subprocess.Popen(
        [*within, *up, "--json", "--port", str(port), "--admin-port", "0", "--model", model, *args],
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | PATIENT | (env or {}),
    )
    cluster = Cluster(process, f"http://127.0.0.1:{port}", log, model)
    if api_key:
        cluster.headers["authorization"] = f"Bearer {api_key}"

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                cluster.events.put(json.loads(line))
            except ValueError:
                with log.open("a") as file:
                    file.write(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        cluster.url = str(cluster.wait_event("ready", READY_SECONDS)["url"])
    except BaseException:
        stop_cluster(cluster)
        raise
    models = httpx.get(cluster.url + "/v1/models", headers=cluster.headers, timeout=30).json()
    cluster.model = models["data"][0]["id"]
    return cluster


def stop_cluster(cluster: Cluster) -> None:
    """SIGTERM; all must be gone before long."""
    if cluster.process.poll() is None:
        cluster.process.send_signal(signal.SIGTERM)
    try:
        cluster.process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        cluster.process.kill()
        pytest.fail(f"tandem up does not stop; log:\n{cluster.log.read_text()[-4000:]}")
