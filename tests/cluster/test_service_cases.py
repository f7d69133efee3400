"""Faults that users reported of how such systems count, start and guard themselves, as inputs to a running cluster.

Ids name the reports.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from cluster.harness import Cluster
from cluster.process_sockets import sockets_of

from services.running import find, members_of
from services.security import key_of
from services.zmq_sockets import secure

OUTCOMES = ("ok", "client_error", "server_error", "cancelled")


def stream(cluster: Cluster, leave_after: int = 0, **fields: Any) -> list[float]:
    """Seconds after it was sent at which each chunk of a stream came; the client leaves after so many, if told."""
    body = {"model": cluster.model, "prompt": "Count: one, two, three", "ignore_eos": True, "stream": True} | fields
    times: list[float] = []
    began = time.monotonic()
    with httpx.stream("POST", cluster.url + "/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic() - began)
                if len(times) == leave_after:
                    break
    return times


def books(cluster: Cluster) -> dict[str, float]:
    """What the gateway has counted so far."""
    found = {outcome: cluster.metric("tandem_requests_total", outcome=outcome) for outcome in OUTCOMES}
    found["received"] = cluster.metric("tandem_requests_received_total")
    for name in ("ttft", "itl"):
        found[name] = cluster.metric(f"tandem_{name}_seconds_count")
        found[name + "_seconds"] = cluster.metric(f"tandem_{name}_seconds_sum")
    return found


def test_b279_times_are_counted_once_a_request(cluster: Cluster) -> None:
    cluster.wait_idle()
    before = books(cluster)
    stream(cluster, max_tokens=3)
    stream(cluster, max_tokens=3, n=2)
    stream(cluster, max_tokens=400, leave_after=1)
    refused = httpx.post(cluster.url + "/v1/completions", json={"model": cluster.model, "n": 10**9}, timeout=30)
    assert refused.status_code == 400
    cluster.wait_idle()
    counted = {name: value - before[name] for name, value in books(cluster).items()}
    assert counted["ttft"] == 3
    assert {outcome: counted[outcome] for outcome in OUTCOMES} == {
        "ok": 2,
        "cancelled": 1,
        "client_error": 1,
        "server_error": 0,
    }
    assert counted["received"] == 4


def test_b280_b286_the_first_token_is_when_the_client_had_it(cluster: Cluster) -> None:
    """What the gateway has seen lies within what the client has seen, and holds what the workers say of it."""
    cluster.wait_idle()
    before = books(cluster)
    times = stream(cluster, max_tokens=64)
    seen = {name: value - before[name] for name, value in books(cluster).items()}
    assert seen["ttft"] == 1 and 0 < seen["ttft_seconds"] <= times[0] < times[-1]
    assert seen["itl"] == 63 and seen["itl_seconds"] > 0
    # Of two clocks that run alike: to the first token and from it to the last one, within the whole.
    assert seen["ttft_seconds"] + seen["itl_seconds"] <= times[-1]
    latest = httpx.get(cluster.admin + "/api/live", timeout=30).json()["requests"][0]
    prefill = next(bar for bar in latest["bars"] if bar["stage"] == "prefill")
    assert seen["ttft_seconds"] >= prefill["seconds"] > 0


def test_b281_the_share_of_the_only_gateway_is_everything(cluster: Cluster) -> None:
    told = [httpx.get(cluster.admin + path, timeout=30).text for path in ("/metrics", "/metrics/share")]
    whole, share = ({line for line in text.splitlines() if "tandem_member_up{" in line} for text in told)
    assert len(whole) == 4 and share == whole


@pytest.mark.parametrize(("role", "setting"), [("gateway", "ADMIN_PORT"), ("router", "RPC_PORT")])
def test_b291_b309_a_taken_port_ends_the_start_and_is_named(cluster: Cluster, role: str, setting: str) -> None:
    running = find(cluster.url)
    state = {"STATE": running.state, "CLUSTER": running.cluster, "CLUSTER_KEY": running.cluster_key}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        told = state | {"MODEL": "smollm2", "PORT": "0", "ADMIN_PORT": "0", setting: port}
        process = subprocess.run(
            [sys.executable, "-m", "services.cli", "serve", role],
            env=os.environ | {f"TANDEM_{name}": value for name, value in told.items()},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert process.returncode not in (0, None) and f"127.0.0.1:{port}" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"best_of": 10**9},
        {"logprobs": 10**6},
        {"stop": ["x"] * 10**6},
        {"max_tokens": 2**31},
        {"max_tokens": 10**100},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_b333_huge_numbers_cost_nothing(cluster: Cluster, fields: dict[str, Any]) -> None:
    before = resident(cluster.pids["gateway"])
    body = json.dumps({"model": cluster.model, "prompt": "x"} | fields)
    answer = httpx.post(cluster.url + "/v1/completions", content=body, timeout=120)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert resident(cluster.pids["gateway"]) < before + (200 << 20)
    assert cluster.metric("tandem_requests_running") == 0


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("piece", [b"x-long: " + b"a" * 65536, b"x: y\r\n" * 10_000], ids=["long", "many"])
def test_b334_headers_are_not_gathered(cluster: Cluster, piece: bytes) -> None:
    before = resident(cluster.pids["gateway"])
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(b"GET /live HTTP/1.1\r\n")
        with pytest.raises(OSError):  # it is closed while we send
            for _ in range(16_384):  # 1 GiB at most
                raw.sendall(piece)
    assert resident(cluster.pids["gateway"]) < before + (10 << 20)
    assert httpx.get(cluster.url + "/live", timeout=30).status_code == 200


def test_b336_what_would_run_code_runs_nowhere(cluster: Cluster, tmp_path: Path) -> None:
    """A pickle that makes a file, to every port on which any process listens; nobody ends, and all goes on."""
    made = tmp_path / "made"
    pickled = f"cposix\nsystem\n(S'touch {made}'\ntR.".encode()
    processes = dict(cluster.pids)
    ports = {port for pid in processes.values() for port in listening(pid)}
    assert len(ports) > 6, ports
    for port in ports:
        for message in (pickled, len(pickled).to_bytes(4, "big") + pickled, b"\xff" + bytes(8) + b"\x7f" + pickled):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
                raw.settimeout(0.2)
                with contextlib.suppress(OSError):  # it hangs up, or waits for more
                    raw.sendall(message)
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(4096):
                        pass
    assert stream(cluster, max_tokens=3)
    assert not made.exists()
    assert all(Path(f"/proc/{pid}").exists() for pid in processes.values()) and cluster.pids == processes


def listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    return {
        int(found.getsockname()[1])
        for found in sockets_of(pid)
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


async def test_b337_events_are_for_those_with_the_key(cluster: Cluster) -> None:
    running = find(cluster.url)
    (worker,) = await members_of(running, "decode")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    heard = {}
    for key in (None, key_of(running)):
        subscriber = context.socket(zmq.SUB)
        secure(subscriber, key, server=False)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(worker.events_address)
        heard[key is None] = bool(subscriber.poll(15_000 if key else 2_000))  # beats come twice a second
        subscriber.close(linger=0)
    assert heard == {True: False, False: True}


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 300, "SmolLM2-135M-Instruct/../SmolLM2-135M-Instruct"]
)
def test_b345_names_of_models_are_no_paths(cluster: Cluster, name: str) -> None:
    answer = httpx.post(cluster.url + "/v1/completions", json={"model": name, "prompt": "x"}, timeout=30)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
