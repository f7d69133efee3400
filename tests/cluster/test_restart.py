"""A worker that comes back at the address of one that was killed serves at once; its peers just go on."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster, free_port, start_cluster, stop_cluster
from cluster.streams import body
from cluster.tiny import tiny_model
from faults_hit import must_hit

from services.embedded_state import EmbeddedState

KEY = "0123456789abcdef" * 2
OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")


class Single:
    """One worker at a fixed address, outside of the supervisor of `tandem up`."""

    def __init__(self, role: str, model: str, environment: dict[str, str], log: Path) -> None:
        self.role = role
        self.port = free_port()
        self._log = log
        self._environment = os.environ | environment
        self._command = [sys.executable, "-m", "services.cli", "serve", role, "--name", "single", "--model", model]
        self._command += ["--rpc-port", str(self.port), *OPTIONS]
        self.start()

    def start(self) -> None:
        self.ready_at = 0.0
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if " ready " in line:
                self.ready_at = time.monotonic()
            with self._log.open("a") as file:
                file.write(line)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not self.ready_at:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, proved."""
        self._process.kill()
        assert self._process.wait(10) == -signal.SIGKILL


@pytest.fixture(params=["decode", "prefill"])
def joined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cluster, Single]]:
    """A cluster that `tandem up` runs, and its only prefill worker or a second decode worker beside it."""
    model = str(tiny_model(tmp_path / "tiny"))
    with contextlib.closing(EmbeddedState()) as state:
        environment = {"TANDEM_STATE": state.url, "TANDEM_CLUSTER_KEY": KEY}
        single = Single(request.param, model, environment, tmp_path / "single.log")
        try:
            single.wait_ready()
            others = ("--prefill", "1" if single.role == "decode" else "0", "--decode", "1")
            options = (*others, "--local-prefill-tokens", "0", *OPTIONS)
            cluster = start_cluster(tmp_path, *options, model=model, env=environment)
            try:
                yield cluster, single
            finally:
                stop_cluster(cluster)
        finally:
            single.kill()


def ask(cluster: Cluster, number: int) -> list[str] | None:
    """The tokens; None for an answer that says to come again."""
    request = body(cluster.model, number, 30) | {"stream": False}
    answer = httpx.post(cluster.url + "/v1/completions", json=request, timeout=120)
    if answer.status_code == 503:
        return None
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["logprobs"]["tokens"])


def transferred(cluster: Cluster, single: Single) -> float:
    """Transfers with the single worker at one end; a decode worker that was started again has counted none."""
    worker = "single" if single.role == "decode" else "decode-0"
    return cluster.metric("tandem_kv_transfers_total", outcome="committed", worker=worker)


def test_a_restarted_worker_serves_within_three_seconds(joined: tuple[Cluster, Single]) -> None:
    cluster, single = joined
    expected = [ask(cluster, number) for number in range(4)]
    assert None not in expected
    pids = dict(cluster.pids)
    single.kill()
    single.start()
    single.wait_ready()
    committed = 0.0 if single.role == "decode" else transferred(cluster, single)
    number = 100
    while ask(cluster, number) is None or transferred(cluster, single) <= committed:
        number += 10  # another prompt, of which nothing is cached
        assert time.monotonic() < single.ready_at + 120, "KV is not transferred again"
    took = time.monotonic() - single.ready_at
    print(f"{single.role}: KV moved {took:.2f} s after the worker was ready")
    # No speed, but a promise: no wait of peers for the one that died may lie in the way. A busy machine has none to
    # keep, so it is tried again there.
    must_hit(took < 3.0, f"KV moved {took:.2f} s after the worker was ready")
    assert [ask(cluster, number) for number in range(4)] == expected
    assert cluster.pids == pids
    assert all(Path(f"/proc/{pid}").exists() for pid in pids.values())
    cluster.wait_idle()
