"""One trace for each request, at a real OTLP receiver; what a client is told of its time; what logs never say."""

import json
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from openai import OpenAI
from otlp_receiver import OtlpReceiver, Span

PROMPT = [(7 * i) % 40_000 + 10 for i in range(100)]
API_KEY = "key-" + secrets.token_hex(16)
OPTIONS = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


def started(folder: Path, collector: OtlpReceiver, *args: str) -> Cluster:
    """A cluster that logs all that it can, as JSON, and exports its spans soon."""
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "NO_PROXY": "127.0.0.1",
        "TANDEM_LOG_FORMAT": "json",
        "TANDEM_LOG_LEVEL": "debug",
        "TANDEM_API_KEYS": API_KEY,
    }
    model = str(tiny_model(folder / "tiny"))
    return start_cluster(folder, *OPTIONS, *args, model=model, env=env, api_key=API_KEY)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver) -> Iterator[Cluster]:
    """One prefill worker and two decode workers."""
    running = started(tmp_path_factory.mktemp("traces"), collector, "--prefill", "1", "--decode", "2")
    yield running
    stop_cluster(running)


def ask(cluster: Cluster, trace: str = "", **fields: Any) -> httpx.Response:
    headers = cluster.headers | {"x-tandem-timing": "1"}
    if trace:
        headers["traceparent"] = f"00-{trace}-{'c' * 16}-01"
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(cluster.url + "/v1/completions", json=body | fields, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def of(spans: list[Span], name: str, service: str = "") -> list[Span]:
    return [span for span in spans if span.name == name and span.service.endswith(service)]


def has(*names: str) -> Any:
    """Whether spans of these names are there, each as often as it is named."""
    return lambda spans: Counter(span.name for span in spans) >= Counter(names)


def timing(header: str) -> list[tuple[str, dict[str, str]]]:
    """Entries of a Server-Timing header, with their parameters."""
    entries = []
    for entry in header.split(", "):
        name, *parameters = entry.split(";")
        entries.append((name, dict(parameter.split("=") for parameter in parameters)))
    return entries


def test_a_request_is_one_trace_over_all_processes(cluster: Cluster, collector: OtlpReceiver) -> None:
    trace = secrets.token_hex(16)
    ask(cluster, trace)
    spans = collector.wait(trace, has("gateway", "place", "queue", "queue", "prefill", "transfer", "decode"))
    (gateway,), (place,), (transfer,) = (of(spans, name) for name in ("gateway", "place", "transfer"))
    (prefill,), (decode,) = of(spans, "prefill"), of(spans, "decode")
    assert gateway.parent == "c" * 16  # the client's
    assert {place.parent, transfer.parent, decode.parent} == {gateway.id}
    assert prefill.parent == transfer.id
    (here,), (there,) = of(spans, "queue", "decode"), of(spans, "queue", "prefill")
    assert here.parent == gateway.id and there.parent == transfer.id
    assert [span.service for span in (gateway, place, transfer, prefill, decode)] == [
        f"tandem-{role}" for role in ("gateway", "router", "decode", "prefill", "decode")
    ]
    assert place.end <= here.end <= transfer.begin <= prefill.begin <= prefill.end <= transfer.end
    assert gateway.begin <= place.begin and transfer.end <= decode.end
    assert transfer.attributes["tandem.bytes"] > 0 and decode.attributes["tandem.tokens"] == 8
    assert not any(span.failed for span in spans)


def test_the_client_is_told_where_its_time_went(cluster: Cluster) -> None:
    entries = timing(ask(cluster, prompt=PROMPT[::-1]).headers["server-timing"])
    assert Counter(name for name, _ in entries) == Counter(
        ("place", "queue", "queue", "prefill", "transfer", "first_decode", "decode", "total")
    )
    assert {float(entry["attempt"]) for name, entry in entries if name != "total"} == {0}
    workers = {name: entry.get("desc") for name, entry in entries}
    assert workers["prefill"] == '"prefill-0"' and workers["decode"].startswith('"decode-')
    total = float(entries[-1][1]["dur"])
    assert all(0 <= float(e["start"]) <= float(e["start"]) + float(e["dur"]) <= total for _, e in entries[:-1])


def test_a_stream_ends_with_it_and_openai_clients_do_not_mind(cluster: Cluster) -> None:
    lines = ask(cluster, stream=True).text.split("\n\n")
    assert lines[-2] == "data: [DONE]" and lines[-3].startswith(": server-timing place;dur=")
    client = OpenAI(base_url=cluster.url + "/v1", api_key=API_KEY, default_headers={"x-tandem-timing": "1"})
    chunks = list(client.completions.create(model=cluster.model, prompt="hello", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason


def test_who_does_not_ask_is_not_told(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 2}
    answer = httpx.post(cluster.url + "/v1/completions", json=body, headers=cluster.headers, timeout=120)
    assert "server-timing" not in answer.headers


def test_a_client_that_wants_no_trace_gets_none(cluster: Cluster, collector: OtlpReceiver) -> None:
    unwanted, wanted = secrets.token_hex(16), secrets.token_hex(16)
    headers = cluster.headers | {"traceparent": f"00-{unwanted}-{'c' * 16}-00"}
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 2}
    assert httpx.post(cluster.url + "/v1/completions", json=body, headers=headers, timeout=120).status_code == 200
    ask(cluster, wanted, max_tokens=2)
    collector.wait(wanted, has("gateway", "place", "transfer", "prefill", "decode"))
    assert not [span for span in collector.spans if span.trace == unwanted]


def test_a_request_that_moves_stays_one_trace(cluster: Cluster, collector: OtlpReceiver) -> None:
    """Its decode worker is killed under the stream: the next attempt is in the same trace."""
    trace = secrets.token_hex(16)
    headers = cluster.headers | {"traceparent": f"00-{trace}-{'c' * 16}-01", "x-tandem-timing": "1"}
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", cluster.url + "/v1/completions", json=body, headers=headers, timeout=120) as answer:
        for piece in answer.iter_text():
            if not text:
                place = of(collector.wait(trace, lambda spans: bool(of(spans, "place"))), "place")[0]
                os.kill(cluster.pids[str(place.attributes["tandem.decode"])], signal.SIGKILL)
            text += piece
    assert "data: [DONE]" in text
    event = cluster.wait_event("restarted", 120)
    cluster.pids[str(event["name"])] = int(str(event["pid"]))
    spans = collector.wait(
        trace, lambda spans: len(of(spans, "place")) >= 2 and bool(of(spans, "gateway") and of(spans, "decode"))
    )
    (gateway,) = of(spans, "gateway")
    first, second = of(spans, "place")[:2]
    assert first.attributes["tandem.attempt"] == 0 and second.attributes["tandem.attempt"] == 1
    assert first.attributes["tandem.decode"] != second.attributes["tandem.decode"]
    (decode,) = of(spans, "decode")
    assert first.parent == second.parent == decode.parent == gateway.id
    (comment,) = [line for line in text.split("\n\n") if line.startswith(": server-timing ")]
    attempts = Counter(entry["attempt"] for name, entry in timing(comment[16:]) if name == "place")
    assert attempts == {"0": 1, "1": 1}


def test_an_aggregated_worker_queues_prefills_and_decodes(tmp_path: Path, collector: OtlpReceiver) -> None:
    running = started(tmp_path, collector, "--aggregated", "1")
    try:
        trace = secrets.token_hex(16)
        entries = timing(ask(running, trace).headers["server-timing"])
        assert [name for name, _ in entries][:3] == ["place", "queue", "prefill"]
        spans = collector.wait(trace, has("gateway", "place", "queue", "prefill", "decode"))
        (gateway,) = of(spans, "gateway")
        assert {span.parent for span in spans if span is not gateway} == {gateway.id}
        queue, prefill, decode = (of(spans, name)[0] for name in ("queue", "prefill", "decode"))
        assert queue.end <= prefill.begin < prefill.end <= decode.end and not of(spans, "transfer")
    finally:
        stop_cluster(running)


def test_logs_have_ids_and_neither_prompts_nor_keys(cluster: Cluster) -> None:
    """All processes at `debug`, as JSON, after good, bad and failed requests."""
    secret = "xyzzy" + secrets.token_hex(8)
    trace = secrets.token_hex(16)
    headers = cluster.headers | {"traceparent": f"00-{trace}-{'c' * 16}-01", "x-request-id": "wanted-" + trace}
    url = cluster.url + "/v1/chat/completions"
    body = {"model": cluster.model, "messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    codes = [
        httpx.post(url, json=body, headers=headers, timeout=120).status_code,
        httpx.post(url, json=body | {"temperature": secret}, headers=headers, timeout=120).status_code,
        httpx.post(url, json=body, headers={"authorization": f"Bearer {secret}"}, timeout=120).status_code,
        httpx.post(url, content=secret.encode(), headers=headers, timeout=120).status_code,
    ]
    assert codes == [200, 400, 401, 400]

    def lines() -> list[dict[str, Any]]:
        texts = [line.partition(" | ")[2] for line in cluster.log.read_text().splitlines()]
        return [json.loads(text) for text in texts if text.startswith("{")]

    deadline = time.monotonic() + 60
    while True:  # other lines may come before the last of these three
        told = [line for line in lines() if line.get("request_id") == "wanted-" + trace]
        if len(statuses := [line["status"] for line in told if line["event"] == "request"]) == 3:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert statuses == [200, 400, 400] and {line["trace_id"] for line in told} == {trace}
    text = cluster.log.read_text()
    assert secret not in text and API_KEY not in text and API_KEY.encode().hex() not in text
    assert os.environ.get("TANDEM_CLUSTER_KEY", "no key here") not in text
