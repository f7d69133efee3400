"""What can be reached of a cluster from another machine: a network namespace, without a key and with one."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from cluster.two_hosts import Network, network

from services.api_keys import entry_for, new_key
from services.certificates import issue

KEY = new_key()
PROMPT = "Whatever nobody else may read, as quorxity"
CERTIFICATES = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")

# Which ports of an address accept a connection.
SCAN = """
import json, socket, sys
host, *ports = sys.argv[1:]
found = []
for port in map(int, ports):
    with socket.socket() as probe:
        probe.settimeout(5)
        if probe.connect_ex((host, port)) == 0:
            found.append(port)
print(json.dumps(found))
"""

# Statuses of requests given as lines of JSON: method, URL, headers, body.
ASK = """
import json, sys, httpx
with httpx.Client(trust_env=False, timeout=120) as client:
    for line in sys.stdin:
        method, url, headers, body = json.loads(line)
        answer = client.request(method, url, headers=headers, content=body.encode())
        print(json.dumps([answer.status_code, answer.text]), flush=True)
"""

# How each gRPC port answers a member's call: as a member, without TLS, without a certificate, with a stranger's.
CALL = """
import asyncio, json, pathlib, sys
import grpc
from services.rpc import cluster_pb2, cluster_pb2_grpc
from services.rpc_server import make_channel, _StreamSigner, _UnarySigner
from services.logs import configure
from services.running import find, members_of
from services.security import ClusterKey, key_of

configure("warning", "console")
url, own, strange = sys.argv[1:]

async def call(channel):
    async with channel:
        try:
            await cluster_pb2_grpc.NodeStub(channel).Metrics(cluster_pb2.MetricsRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

def secure(address, key, folder):
    files = [pathlib.Path(folder, name).read_bytes() for name in ("tls.key", "tls.crt")] if folder else []
    credentials = grpc.ssl_channel_credentials(pathlib.Path(own, "ca.crt").read_bytes(), *files)
    options, signers = [("grpc.ssl_target_name_override", "tandem")], [_UnarySigner(key), _StreamSigner(key)]
    return grpc.aio.secure_channel(address, credentials, options, interceptors=signers)

async def main():
    running = find(url)
    key = ClusterKey(running.cluster_key)
    for member in await members_of(running):
        at = member.grpc_address
        channels = [make_channel(at, key_of(running)), make_channel(at, key), secure(at, key, "")]
        channels.append(secure(at, key, strange))
        print(json.dumps([member.role, *[await call(channel) for channel in channels]]))

asyncio.run(main())
"""


def run(program: str, *arguments: str, space: str = "", text: str = "") -> list[str]:
    """Runs a Python program, here or in a namespace; its lines."""
    command = ["ip", "netns", "exec", space] if space else []
    command += [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def listening(space: str) -> dict[int, set[str]]:
    """Addresses of all TCP sockets that listen in a namespace, by port."""
    shown = subprocess.run(["ip", "netns", "exec", space, "ss", "-Hltn"], capture_output=True, text=True, check=True)
    found: dict[int, set[str]] = {}
    for line in shown.stdout.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        found.setdefault(int(port), set()).add(address.strip("[]").removeprefix("::ffff:"))
    return found


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All of its processes are in a namespace; the strangers are here."""
    folder = tmp_path_factory.mktemp("ports")
    (folder / "keys.toml").write_text(entry_for("alice", KEY, requests_per_minute=1000).toml())
    address = net.addresses["prefill"]
    options = ["--host", address, "--api-keys-file", str(folder / "keys.toml"), "--log-level", "debug"]
    issue(folder / "certs", "tandem", timedelta(days=1), timedelta(days=1))
    options += [f"--tls-{name}={folder / 'certs' / file}" for name, file in CERTIFICATES.items()]
    options += ["--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--connector", "tcp"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", address)
        model = str(tiny_model(folder / "tiny"))
        space = ("ip", "netns", "exec", net.space("prefill"))
        running = start_cluster(folder, *options, model=model, api_key=KEY, within=space)
    try:
        yield running
    finally:
        stop_cluster(running)


def ask(cluster: Cluster, *requests: tuple[str, str, dict[str, str], str]) -> list[tuple[int, str]]:
    """From the stranger's machine: statuses and bodies."""
    text = "".join(json.dumps([method, cluster.url + path, *rest]) + "\n" for method, path, *rest in requests)
    return [tuple(json.loads(line)) for line in run(ASK, text=text)]


def body(cluster: Cluster, **fields: object) -> str:
    return json.dumps({"model": cluster.model, "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True} | fields)


def test_only_the_gateway_answers_other_machines(net: Network, cluster: Cluster) -> None:
    address = net.addresses["prefill"]
    public = int(cluster.url.rpartition(":")[2])
    listens = listening(net.space("prefill"))
    assert len(listens) > 6, listens  # gRPC of each process, the admin port, tokens, KV, the cluster state
    assert int(cluster.admin.rpartition(":")[2]) in listens
    assert {port for port, addresses in listens.items() if addresses != {"127.0.0.1"}} == {public}
    (found,) = run(SCAN, address, *map(str, listens))
    assert json.loads(found) == [public]
    (inside,) = run(SCAN, "127.0.0.1", *map(str, listens), space=net.space("prefill"))
    assert set(json.loads(inside)) == listens.keys() - {public}, "the scan does not find what is open"


def test_grpc_ports_answer_members_alone(net: Network, cluster: Cluster) -> None:
    """On the cluster's own machine, by who has the cluster key, too."""
    own, strange = cluster.log.parent / "certs", cluster.log.parent / "strange"
    issue(strange, "tandem", timedelta(days=1), timedelta(days=1))
    lines = [json.loads(line) for line in run(CALL, cluster.url, str(own), str(strange), space=net.space("prefill"))]
    assert sorted(role for role, *_ in lines) == ["decode", "gateway", "prefill", "router"]
    for role, *answers in lines:
        assert answers == ["OK", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"], role


def test_without_a_key_there_are_two_paths(cluster: Cluster) -> None:
    (document,) = ask(cluster, ("GET", "/openapi.json", {"authorization": f"Bearer {KEY}"}, ""))
    paths = [*json.loads(document[1])["paths"], "/docs", "/openapi.json", "/metrics", "/", "/v1", "/admin", "/debug"]
    paths += [
        "//live",
        "/live/",
        "/live/../v1/models",
        "/health%2f..%2fv1/models",
        "/live%00",
        "/LIVE",
        "/docs/oauth2-redirect",
    ]
    wrong = (
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEY[:-1]}x"},
        {"authorization": f"Basic {KEY}"},
    )
    requests = [(method, path, headers, "") for path in paths for method in METHODS for headers in wrong]
    for (method, path, headers, _), (status, text) in zip(requests, ask(cluster, *requests), strict=True):
        if path in ("/live", "/health"):
            assert status == (200 if method == "GET" else 405), (method, path, status)
        else:
            assert status in (401, 404), (method, path, headers, status)
        assert KEY[:-1] not in text


def test_with_a_key_it_serves_within_bounds(cluster: Cluster) -> None:
    """And bodies that are too long or no JSON are refused in the API's shape."""
    headers = {"authorization": f"Bearer {KEY}"}
    asked = [body(cluster), body(cluster, priority=-1), body(cluster, prompt="x" * (9 << 20)), body(cluster, n=10**9)]
    asked += ["", "[" * 100_000, '{"model":', body(cluster, max_tokens=-1), body(cluster, stop=["x"] * 17)]
    answers = ask(cluster, *(("POST", "/v1/completions", headers, each) for each in asked))
    assert [status for status, _ in answers] == [200, 403, 413, 400, 400, 400, 400, 400, 400]
    assert all(json.loads(text)["error"]["message"] for _, text in answers[1:])
    assert not any(KEY in text for _, text in answers)


def test_neither_keys_nor_prompts_are_logged(cluster: Cluster) -> None:
    wrong = new_key()
    requests = [("POST", "/v1/completions", {"authorization": f"Bearer {key}"}, body(cluster)) for key in (KEY, wrong)]
    assert [status for status, _ in ask(cluster, *requests)] == [200, 401]
    log = cluster.log.read_text()
    assert "gateway listens" in re.sub(r"\s+", " ", log)
    for secret in (KEY, wrong, "quorxity"):
        assert secret not in log


def test_only_the_gateway_is_told_of_keys(cluster: Cluster) -> None:
    headers, asked = {"authorization": f"Bearer {KEY}"}, body(cluster, max_tokens=1500, stream=True)
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", cluster.url + "/v1/completions", headers=headers, content=asked) as answer,
    ):
        assert answer.status_code == 200 and next(answer.iter_lines())
        assert in_memory(cluster.pids["gateway"], KEY.encode())  # as long as the request is under way, at least
    assert not {name for name, pid in cluster.pids.items() if name != "gateway" and in_memory(pid, KEY.encode())}
    assert not any(KEY.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cluster.pids.values())


def in_memory(pid: int, secret: bytes) -> bool:
    """Whether a process has these bytes anywhere in what it may write to, its environment too."""
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, modes, _, _, inode, *_ = line.split()
            if modes.startswith("rw") and inode == "0":
                start, end = (int(each, 16) for each in place.split("-"))
                memory.seek(start)
                with contextlib.suppress(OSError):  # a guard page
                    if secret in memory.read(end - start):
                        return True
    return False


def test_a_key_that_is_taken_away_opens_nothing(cluster: Cluster) -> None:
    """While the cluster runs, and another one is given."""
    file, other = cluster.log.parent / "keys.toml", new_key()
    before = file.read_text()
    file.write_text(entry_for("bob", other).toml())
    try:
        for _ in range(60):
            requests = [("GET", "/v1/models", {"authorization": f"Bearer {key}"}, "") for key in (KEY, other)]
            statuses = [status for status, _ in ask(cluster, *requests)]
            if statuses == [401, 200]:
                return
        pytest.fail(f"still {statuses}")
    finally:
        file.write_text(before)
