"""The gateway as its clients see it: a real cluster of processes around a very small model with random weights."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cluster.harness import free_port
from cluster.tiny import tiny_model

from services.embedded_state import EmbeddedState

MODEL = "tiny"
CONTEXT = 1024
KEYS = "first-key,second-key"
ADMIN_KEY = "the key of the admin port"


@dataclass
class Processes:
    """Router, gateway and one aggregated worker."""

    url: str
    admin: str  # URL of the admin side
    running: dict[str, subprocess.Popen[bytes]]
    environment: dict[str, str]
    folder: Path

    def start(self, role: str, **settings: str) -> subprocess.Popen[bytes]:
        environment = self.environment | {f"TANDEM_{name.upper()}": value for name, value in settings.items()}
        environment.setdefault("TANDEM_NAME", role)
        log = (self.folder / f"{role}.log").open("ab")
        command = [sys.executable, "-m", "services.cli", "serve", role]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.running[role] = process
        return process

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("gateway")
    state = EmbeddedState()
    port, admin_port = free_port(), free_port()
    environment = dict(os.environ) | {
        "TANDEM_STATE": state.url,
        "TANDEM_MODEL": str(tiny_model(folder / "model")),
        "TANDEM_MODEL_NAME": MODEL,
        "TANDEM_MODEL_ALIASES": f"gpt-4o={MODEL}, org/default={MODEL}",
        "TANDEM_PORT": str(port),
        "TANDEM_ADMIN_PORT": str(admin_port),
        "TANDEM_ADMIN_KEY": ADMIN_KEY,
        "TANDEM_API_KEYS": KEYS,
        "TANDEM_DUMMY_SEED": "3",
        "TANDEM_KV_BLOCKS": "512",
        "TANDEM_MAX_MODEL_LEN": str(CONTEXT),
        "TANDEM_BODY_TIMEOUT": "2",
        "TANDEM_CLUSTER_KEY": "a secret of the test cluster",
        "OMP_NUM_THREADS": "1",
    }
    processes = Processes(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", {}, environment, folder)
    try:
        for role in ("router", "aggregated", "gateway"):
            processes.start(role)
        wait_ready(processes)
        yield processes
    finally:
        for process in processes.running.values():
            process.send_signal(signal.SIGTERM)
        stuck = []
        for role, process in processes.running.items():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                stuck.append(role)
        state.close()
        assert not stuck, (stuck, processes.logs())


def wait_ready(processes: Processes, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if httpx.get(processes.url + "/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("the cluster is not ready:\n" + processes.logs())


@pytest.fixture(scope="module")
def client(processes: Processes) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=processes.url, timeout=60, headers={"authorization": "Bearer first-key"}) as client:
        yield client


@pytest.fixture(scope="module")
def admin(processes: Processes) -> Iterator[httpx.Client]:
    """Of whoever runs the cluster."""
    with httpx.Client(base_url=processes.admin, timeout=10, auth=("any", ADMIN_KEY)) as client:
        yield client


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | fields
    return client.post("/v1/completions", json=body)


def chat(client: httpx.Client, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0} | fields
    return client.post("/v1/chat/completions", json=body)


def events(client: httpx.Client, path: str, **fields: object) -> list[dict[str, object]]:
    """All events of a stream; it must end with [DONE]."""
    lines = []
    with client.stream("POST", path, json={"model": MODEL, "stream": True} | fields) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(admin: httpx.Client, name: str, **labels: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    return sum(
        sample.value
        for family in text_string_to_metric_families(admin.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_completion(client: httpx.Client) -> None:
    answer = complete(client, ignore_eos=True).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 8 + answer["usage"]["prompt_tokens"]
    assert answer == complete(client, ignore_eos=True).json() | {"id": answer["id"], "created": answer["created"]} | {
        "usage": answer["usage"]
    }


def test_cached_tokens_are_told_and_tenants_do_not_share(client: httpx.Client) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8

    def cached(**options: object) -> int:
        return int(complete(client, prompt=prompt, **options).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() >= 64
    assert cached(cache_salt="mine") == 0
    other = httpx.Client(base_url=client.base_url, timeout=60, headers={"authorization": "Bearer second-key"})
    assert complete(other, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stream_equals_whole(client: httpx.Client) -> None:
    fields = {"prompt": "Hello there", "max_tokens": 20, "temperature": 0.8, "seed": 5, "n": 3, "logprobs": 2}
    whole = complete(client, **fields).json()
    chunks = events(client, "/v1/completions", stream_options={"include_usage": True}, **fields)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert {**chunks[-1]["usage"], "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}
    for index in range(3):
        mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
        expected = whole["choices"][index]
        assert "".join(c["text"] for c in mine) == expected["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [expected["finish_reason"]]
        for field in ("tokens", "text_offset", "token_logprobs"):
            streamed = [value for c in mine for value in c["logprobs"][field]]
            assert streamed == pytest.approx(expected["logprobs"][field], abs=1e-4)
        assert "".join(expected["logprobs"]["tokens"]) == expected["text"]
    # Choices differ, and each is what its own seed gives.
    assert len({choice["text"] for choice in whole["choices"]}) == 3
    assert complete(client, **fields | {"seed": 6, "n": 1}).json()["choices"][0]["text"] == whole["choices"][1]["text"]


def test_chat_stream(client: httpx.Client) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "n": 2, "seed": 1}
    whole = chat(client, temperature=1, **fields).json()
    chunks = events(client, "/v1/chat/completions", **fields)
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(c["delta"].get("content") or "" for c in mine)
        assert text == whole["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [whole["choices"][index]["finish_reason"]]
        assert mine[-1]["finish_reason"] is not None


def test_stop_string_over_tokens_is_never_told(client: httpx.Client) -> None:
    text = complete(client, max_tokens=24, ignore_eos=True).json()["choices"][0]["text"]
    stop = text[5:14]  # random words: it spans tokens
    at = text.index(stop)
    whole = complete(client, max_tokens=24, ignore_eos=True, stop=stop, logprobs=0).json()
    assert whole["choices"][0]["text"] == text[:at]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "".join(whole["choices"][0]["logprobs"]["tokens"]) == text[:at]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["logprobs"]["tokens"]) < 24
    chunks = events(
        client, "/v1/completions", prompt="Once upon a time", max_tokens=24, temperature=0, ignore_eos=True, stop=[stop]
    )
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == text[:at]
    included = complete(client, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=True).json()
    assert included["choices"][0]["text"] == text[: at + len(stop)]


def test_echo_scores_the_prompt(client: httpx.Client) -> None:
    answer = complete(client, prompt="\n1. Carol has 20", echo=True, logprobs=1, max_tokens=0).json()
    choice = answer["choices"][0]
    assert choice["text"] == "\n1. Carol has 20"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    longer = complete(client, prompt=[1, 2, 3], echo=True, skip_special_tokens=False, max_tokens=4).json()
    assert longer["choices"][0]["text"].startswith("<|im_start|><|im_end|>")


def test_prompt_logprobs(client: httpx.Client) -> None:
    scores = chat(client, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert all(len(entry) in (2, 3) and all(e["logprob"] <= 0 for e in entry.values()) for entry in scores[1:])


def test_batch_order(client: httpx.Client) -> None:
    prompts = ["a much longer prompt than the others, which takes its time", "b", "c"]
    answer = complete(client, prompt=prompts, n=2, temperature=1, seed=9).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = complete(client, prompt="c", n=2, temperature=1, seed=9).json()["choices"]
    assert [choice["text"] for choice in alone] == [choice["text"] for choice in answer["choices"][4:]]


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"[" * 100_000, b'{"z":' + b"[" * 100_000, b"\xff\xfe", b""])
def test_malformed_bodies(client: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = client.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_too_long(client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=b" " * (9 << 20)).status_code == 413
    ids = [5] * (CONTEXT - 1)
    fits = complete(client, prompt=ids, max_tokens=50).json()
    assert fits["usage"]["completion_tokens"] == 1
    for length in (CONTEXT, CONTEXT + 1):
        answer = complete(client, prompt=[5] * length)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert complete(client, prompt="word " * 100_000).status_code == 400


def test_a_body_that_does_not_come_is_not_waited_for(processes: Processes) -> None:
    """A byte now and then buys no time, and the connection ends."""
    head = b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer first-key\r\ncontent-length: 4000\r\n\r\n"
    begun, pieces = time.monotonic(), [b" "]
    with socket.create_connection(("127.0.0.1", int(processes.url.rpartition(":")[2])), timeout=0.2) as raw:
        raw.sendall(head)
        while pieces[-1] and time.monotonic() < begun + 20:
            try:
                raw.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    pieces.append(raw.recv(4096))
            except ConnectionError:
                pieces.append(b"")
    assert pieces[1].startswith(b"HTTP/1.1 408 ") and b"body_too_slow" in b"".join(pieces) and not pieces[-1]


def test_errors_in_openai_shape(client: httpx.Client) -> None:
    for answer, status in (
        (complete(client, model="nope"), 404),
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/completions"), 405),
        (client.get("/v1/models/nope"), 404),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert complete(client, temperature=-1).json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("name", [MODEL, "gpt-4o", "org/default"])
def test_aliases_name_the_model(client: httpx.Client, name: str) -> None:
    """And the answer has the name that was asked for; tokens are the same, and cached ones too."""
    body = {"prompt": "Names are but words, and words are cheap", "max_tokens": 4, "temperature": 0}
    answer, same = complete(client, model=name, **body), complete(client, **body)
    assert answer.status_code == 200 and answer.json()["model"] == name
    assert answer.json()["choices"][0]["text"] == same.json()["choices"][0]["text"]
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [MODEL, "gpt-4o", "org/default"]
    entry = client.get(f"/v1/models/{name}").json()
    assert (entry["id"], entry["max_model_len"]) == (name, CONTEXT)


def test_keys(processes: Processes) -> None:
    with httpx.Client(base_url=processes.url, timeout=10) as client:
        paths = client.get("/openapi.json", headers={"authorization": "Bearer second-key"}).json()["paths"]
        assert "/v1/chat/completions" in paths
        for path in [*paths, "/docs", "/openapi.json"]:
            expected = 200 if path in ("/live", "/health") else 401
            assert client.get(path).status_code == expected, path
        wrong = client.post("/v1/completions", headers={"authorization": "Bearer wrong"}, json={})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        client.headers["authorization"] = "Bearer second-key"
        ahead = complete(client, priority=-1)
        assert ahead.status_code == 403 and ahead.json()["error"]["param"] == "priority"
        assert client.get("/metrics").status_code == 404
        assert httpx.get(processes.admin + "/metrics", headers={"authorization": "Bearer first-key"}).status_code == 401


def test_headers_say_what_the_body_is(client: httpx.Client, processes: Processes) -> None:
    """Nothing of the hops behind the gateway: what is called plain is plain, whatever the client would take."""
    head = {"accept-encoding": "gzip, br, zstd, deflate", "te": "trailers", "connection": "keep-alive, x-hop"}
    head |= {"x-hop": "1", "upgrade": "h2c", "proxy-authorization": "Basic x"}
    body = {"model": MODEL, "prompt": "x " * 300, "max_tokens": 4, "ignore_eos": True}
    asked: list[tuple[str, str, dict[str, object] | None]] = [
        ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", body | {"stream": True}),
        ("POST", "/v1/completions", body | {"n": -1}),
        ("GET", "/v1/models", None),
    ]
    for method, path, content in asked:
        with client.stream(method, path, json=content, headers=head) as answer:
            raw = b"".join(answer.iter_raw())
        hop = {"content-encoding", "te", "trailer", "upgrade", "proxy-authenticate", "proxy-authorization", "x-hop"}
        assert not hop & set(answer.headers), (path, answer.headers)
        assert ("content-length" in answer.headers) != ("transfer-encoding" in answer.headers), (path, answer.headers)
        assert int(answer.headers.get("content-length", len(raw))) == len(raw)
        json.loads(raw.removeprefix(b"data: ").split(b"\n")[0])
    zipped = client.post("/v1/completions", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert zipped.status_code == 415 and zipped.json()["error"]["code"] == "unsupported_encoding"
    assert "gzip" in zipped.json()["error"]["message"]


def test_request_id_is_echoed(client: httpx.Client) -> None:
    assert client.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(client.get("/version").headers["x-request-id"]) == 32
    assert complete(client, max_tokens=1).json()["id"] != complete(client, max_tokens=1).json()["id"]


def test_openapi_describes_the_bodies(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(properties)


def test_client_that_leaves_stops_the_work(client: httpx.Client, admin: httpx.Client, processes: Processes) -> None:
    body = {"model": MODEL, "prompt": "x", "n": 8, "max_tokens": 200, "ignore_eos": True, "stream": True}
    before = metric(admin, "tandem_requests_total", outcome="cancelled")
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while True:
        running = metric(admin, "tandem_requests_running")
        active = metric(admin, "tandem_kv_blocks", state="active")
        if running == 0 and active == 0:
            break
        assert time.monotonic() < deadline, (running, active, processes.logs())
        time.sleep(0.05)
    assert metric(admin, "tandem_requests_total", outcome="cancelled") == before + 1


def test_books_balance(client: httpx.Client, admin: httpx.Client) -> None:
    names = ("ok", "client_error", "server_error", "cancelled")

    def counts() -> list[float]:
        return [metric(admin, "tandem_requests_total", outcome=name) for name in names]

    before, ttft = counts(), metric(admin, "tandem_ttft_seconds_count")
    complete(client, n=4)
    complete(client, n=-1)
    complete(client, max_tokens=0)
    assert [after - b for after, b in zip(counts(), before, strict=True)] == [2, 1, 0, 0]
    assert metric(admin, "tandem_ttft_seconds_count") == ttft + 1
    assert sum(counts()) == metric(admin, "tandem_requests_received_total")
    assert metric(admin, "tandem_member_up") == 3


def test_router_has_all_load_back(client: httpx.Client, admin: httpx.Client) -> None:
    """Whichever way requests end: at their length, by a string, by a mistake, by the client."""
    before = metric(admin, "tandem_router_placements_total")
    complete(client, n=3, ignore_eos=True)
    complete(client, stop=["a", "e", "i", "o", " "], max_tokens=200)
    complete(client, n=-1)
    complete(client, prompt=[5] * CONTEXT)
    complete(client, prompt=[5, 6, 7], max_tokens=0, echo=True)
    body = {"model": MODEL, "prompt": "x", "n": 4, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    with contextlib.suppress(httpx.ReadTimeout):
        client.post("/v1/completions", json=body | {"stream": False}, timeout=0.05)
    deadline = time.monotonic() + 10
    while metric(admin, "tandem_router_reservations"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert metric(admin, "tandem_router_placements_total") >= before + 9


def test_many_at_once_are_the_same_as_alone(client: httpx.Client) -> None:
    def ask(number: int) -> str:
        return str(complete(client, prompt=f"Number {number}", temperature=1, seed=number).json()["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == [ask(number) for number in range(16)]


def test_worker_killed_streams_go_on_token_exactly(
    client: httpx.Client, admin: httpx.Client, processes: Processes
) -> None:
    fields = {"max_tokens": 600, "temperature": 1, "ignore_eos": True}

    def whole(number: int) -> str:
        answer = complete(client, prompt=f"Story {number}", seed=number, **fields)
        return str(answer.json()["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(whole, range(4)))
    first = processes.running["aggregated"]
    second = processes.start("aggregated", name="second")
    wait_members(admin, 2)
    moved = metric(admin, "tandem_requests_moved_total")
    started = [threading.Event() for _ in range(4)]

    def tell(number: int) -> str:
        body = {"model": MODEL, "stream": True, "prompt": f"Story {number}", "seed": number} | fields
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, (event, processes.logs())
                    text += event["choices"][0]["text"]
                    started[number].set()
        return text

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        told = [pool.submit(tell, number) for number in range(4)]
        for event in started:
            assert event.wait(30)
        deadline = time.monotonic() + 10
        while not metric(admin, "tandem_kv_blocks", state="active"):
            assert time.monotonic() < deadline  # it is told twice a second
        if metric(admin, "tandem_kv_blocks", worker="second", state="active"):
            first, second = second, first
        first.kill()  # it has some of them
        processes.running["aggregated"] = second
        texts = [future.result() for future in told]
    assert texts == expected
    assert metric(admin, "tandem_requests_moved_total") > moved


def wait_members(admin: httpx.Client, count: int) -> None:
    deadline = time.monotonic() + 60
    while metric(admin, "tandem_member_up", role="aggregated") < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_no_worker_is_503_and_soon(client: httpx.Client, processes: Processes) -> None:
    worker = processes.running.pop("aggregated")
    worker.kill()
    worker.wait()
    started = time.monotonic()
    answer = complete(client)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "unavailable"
    assert time.monotonic() - started < 10
    assert complete(client, model="nope").status_code == 404
    processes.start("aggregated")
    wait_ready(processes)
    assert complete(client).status_code == 200
