"""The scripted server does what its script says, and its log tells the truth."""

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bench.scripted_server import Fault, Script, ScriptedAnswer, ScriptedServer, Sent, start_server

FAST = ScriptedAnswer(ttft=0.01, gaps=(0.005,))


def body(tokens: int = 4, **more: Any) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": "scripted", "prompt": "one two three", "max_tokens": tokens, **usage, **more}


def events(server: ScriptedServer, path: str = "/v1/completions", **asked: Any) -> list[Any]:
    """Data of all events of an answer, [DONE] as it is."""
    with httpx.stream("POST", server.url + path, json=asked or body()) as answer:
        assert answer.status_code == 200
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def chat(tokens: int) -> dict[str, Any]:
    asked = body(messages=[{"role": "user", "content": "one two"}, {"role": "user", "content": [{"text": "three"}]}])
    del asked["prompt"], asked["max_tokens"]
    return {**asked, "max_completion_tokens": tokens}


def exchange(connection: socket.socket) -> bytes:
    """Bytes of an answer until it or the connection ends."""
    data = json.dumps(body()).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    got = b""
    while not got.endswith(b"\r\n0\r\n\r\n") and (piece := connection.recv(65536)):
        got += piece
    return got


def raw(server: ScriptedServer, timeout: float = 5) -> bytes:
    """The same on a connection of its own."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as connection:
        return exchange(connection)


def last_line(server: ScriptedServer) -> Sent:
    """The log's line of the only answer; after a fault it may be written later than the client sees the end."""
    deadline = time.monotonic() + 5
    while not (lines := server.log()) and time.monotonic() < deadline:
        time.sleep(0.01)
    (line,) = lines
    return line


def test_streams_completions_and_chats(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[FAST, msgspec.structs.replace(FAST, cached_tokens=2)])) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["scripted"]
        *texts, usage, done = events(server)
        assert [event["choices"][0]["text"] for event in texts] == [" 0", " 1", " 2", " 3"]
        assert [event["choices"][0]["finish_reason"] for event in texts] == [None, None, None, "length"]
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert done == "[DONE]"
        role, *texts, usage, done = events(server, "/v1/chat/completions", **chat(2))
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [event["choices"][0]["delta"]["content"] for event in texts] == [" 0", " 1"]
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert [(sent.number, sent.tokens, len(sent.times), sent.prompt_tokens) for sent in server.log()] == [
            (0, 4, 4, 3),
            (1, 2, 2, 3),
        ]


def test_what_is_not_streamed_takes_no_entry(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[FAST])) as server:
        whole = httpx.post(f"{server.url}/v1/completions", json=body(2, stream=False)).json()
        assert whole["choices"][0]["text"] == " 0 1"
        assert whole["usage"]["prompt_tokens"] == 3
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=chat(1) | {"stream": False}).json()
        assert whole["choices"][0]["message"]["content"] == " 0"
        assert server.log() == []


def test_delays_do_not_add_up(tmp_path: Path) -> None:
    answer = ScriptedAnswer(
        ttft=0.05,
        gaps=(
            0.03,
            0.01,
        ),
        tokens=20,
    )
    with start_server(tmp_path, Script(answers=[answer])) as server:
        events(server)
        (sent,) = server.log()
    due = [0.05 + 0.02 * number + 0.01 * (number % 2) for number in range(20)]
    lateness = [at - sent.received - when for at, when in zip(sent.times, due, strict=True)]
    assert min(lateness) > -0.002  # timers of the loop count milliseconds
    # Lateness of all before it would make the last one late; where it does not add up, some later one is on time.
    assert min(lateness[10:]) < 0.01


def test_several_tokens_in_a_message(tmp_path: Path) -> None:
    answer = msgspec.structs.replace(FAST, tokens=5, tokens_per_message=2, usage=False)
    with start_server(tmp_path, Script(answers=[answer])) as server:
        *texts, end = events(server)
        assert end == "[DONE]"
        assert [event["choices"][0]["text"] for event in texts] == [" 0 1", " 2 3", " 4"]
        assert (server.log()[0].tokens, len(server.log()[0].times)) == (5, 3)


@pytest.mark.parametrize(("style", "mark"), [("crlf", b"}\r\n\r\n"), ("comments", b": ping\n\ndata: "), ("split", b"")])
def test_styles_change_no_content(tmp_path: Path, style: str, mark: bytes) -> None:
    styled = msgspec.structs.replace(FAST, **{style: True})
    with start_server(tmp_path, Script(answers=[FAST, styled])) as server:
        plain, other = events(server), events(server)
        assert [event["choices"] for event in plain[:-1]] == [event["choices"] for event in other[:-1]]
        plain_bytes, other_bytes = raw(server), raw(server)
        assert mark in other_bytes and (mark not in plain_bytes or not mark)


def test_split_sends_bytes_alone(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[FAST, msgspec.structs.replace(FAST, split=True)])) as server:
        segments = []
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                exchange(connection)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
                segments.append(int.from_bytes(info[152:156], sys.byteorder))  # tcpi_data_segs_in
        assert segments[0] < 20
        assert segments[1] > 50  # the kernel joins bytes while too many segments are not yet acknowledged


def faulty(tmp_path: Path, **fault: Any) -> Any:
    return start_server(tmp_path, Script(answers=[msgspec.structs.replace(FAST, fault=Fault(**fault))]))


def test_refuses_with_status_and_headers(tmp_path: Path) -> None:
    with faulty(tmp_path, kind="http", status=429, headers={"Retry-After": "2"}) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert answer.json()["error"]["code"] == 429
        assert last_line(server).fault == "http"


def test_closes_without_an_answer(tmp_path: Path) -> None:
    with faulty(tmp_path, kind="close") as server:
        assert raw(server) == b""
        assert last_line(server).times == []


def test_resets_the_connection(tmp_path: Path) -> None:
    with faulty(tmp_path, kind="reset", at=2) as server:
        with pytest.raises(ConnectionResetError):
            raw(server)
        assert (last_line(server).fault, last_line(server).tokens) == ("reset", 2)


def test_stalls_until_the_client_leaves(tmp_path: Path) -> None:
    with faulty(tmp_path, kind="stall", at=1) as server:
        with pytest.raises(TimeoutError):
            raw(server, timeout=0.3)
        sent = last_line(server)
        assert (sent.fault, sent.tokens, sent.left, sent.end) == ("stall", 1, True, -1)


@pytest.mark.parametrize(
    ("kind", "tokens", "holds", "lacks"),
    [
        ("malformed", 4, b'data: {"choices": [{"index"\n\n', b"no such bytes"),
        ("error_event", 2, b'data: {"error": {"message"', b"[DONE]"),
        ("cut", 2, b'" 1"', b"[DONE]"),
        ("no_done", 4, b'"length"', b"[DONE]"),
    ],
)
def test_breaks_the_stream(tmp_path: Path, kind: str, tokens: int, holds: bytes, lacks: bytes) -> None:
    with faulty(tmp_path, kind=kind, at=2) as server:
        got = raw(server)
        assert holds in got and lacks not in got
        assert (last_line(server).fault, last_line(server).tokens) == (kind, tokens)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"model": "scripted"', 400),
        (msgspec.json.encode(body() | {"max_tokens": -1}), 400),
        (msgspec.json.encode(body() | {"temperature": "hot"}), 400),
        (msgspec.json.encode(body() | {"prompt": {}}), 400),
        (msgspec.json.encode(body() | {"stream": "sometimes"}), 400),
        (msgspec.json.encode(body() | {"model": "other"}), 404),
    ],
)
def test_refuses_bad_requests(tmp_path: Path, data: bytes, status: int) -> None:
    with start_server(tmp_path, Script(answers=[FAST])) as server:
        assert httpx.post(f"{server.url}/v1/completions", content=data).status_code == status
