"""The streaming client against servers that write bytes as they please."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bench.errors import BenchError
from bench.load.answer import Answer, Manner
from bench.load.http import Pool, parse_url, request_bytes
from bench.load.sse import EventParser, decode_chunk
from bench.measure.record import Record

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNK = b'data: {"choices":[{"index":0,"text":"%s","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
WHOLE = CHUNK % b"a" + CHUNK % b"b" + CHUNK % b"c" + LAST + USAGE + b"data: [DONE]\n\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return await reader.readexactly(length)


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[Pool]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = Pool(parse_url(f"http://127.0.0.1:{port}"))
    try:
        yield pool
    finally:
        pool.close()
        listening.close()


async def ask(pool: Pool, manner: Manner | None = None, timeout: float = 5.0) -> Record:
    record = Record(id=0)
    answer = Answer(record, time.monotonic(), manner or Manner(), keep_text=True)
    await answer.run(pool, request_bytes(pool.address, "POST", "/v1/completions", b"{}"), timeout)
    record.text = "".join(answer.text)
    return record


def answering(*writes: bytes, close: bool = True) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.001)
        if not close:
            await reader.read()

    return handle


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


@pytest.mark.parametrize(
    "head_and_body",
    [
        [HEAD + b"\r\n", WHOLE],
        [HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(WHOLE[:50]), chunked(WHOLE[50:]), b"0\r\n\r\n"],
    ],
)
async def test_bodies_of_every_framing(head_and_body: list[bytes]) -> None:
    async with server(answering(*head_and_body)) as pool:
        record = await ask(pool)
    assert (record.error, record.text, len(record.chunks), record.finish_reason) == ("", "abc", 3, "length")
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 3, 4)
    assert 0 < record.ttft <= record.chunks[-1] <= record.e2e


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_cut_at_every_byte(end: bytes) -> None:
    """B006: an event, usage and [DONE] in any two pieces."""
    stream = (b": ping\n\nevent: x\nid: 1\n" + WHOLE + b"data:no space\n\ndata: two\ndata: lines\n\n").replace(
        b"\n", end
    )
    whole = EventParser().feed(stream)
    assert len(whole) == 8 and whole[-3:] == [b"[DONE]", b"no space", b"two\nlines"]
    for cut in range(len(stream) + 1):
        parser = EventParser()
        assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == whole


@pytest.mark.parametrize(
    ("delta", "carries"),
    [
        (b'{"role":"assistant","content":""}', False),
        (b'{"content":null,"tool_calls":[]}', False),
        (b'{"content":"a"}', True),
        (b'{"reasoning_content":"a"}', True),
        (b'{"reasoning":"a"}', True),
        (b'{"tool_calls":[{"index":0}]}', True),
    ],
)
def test_what_counts_as_output(delta: bytes, carries: bool) -> None:
    chunk = decode_chunk(b'{"choices":[{"delta":%s}],"error":null,"usage":null}' % delta)
    assert chunk.choices is not None and chunk.choices[0].carries_output is carries


async def test_connections_are_used_again() -> None:
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await read_request(reader)
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)

    async with server(handle) as pool:
        records = [await ask(pool) for _ in range(5)]
    assert [record.error for record in records] == [""] * 5 and connections == 1


async def test_a_connection_that_the_server_closed_while_idle_costs_no_request() -> None:
    """The server ends each connection as soon as the next request comes on it, unread."""
    seen = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        await read_request(reader)
        seen += 1
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)
        await reader.read(1)

    async with server(handle) as pool:
        records = [await ask(pool) for _ in range(4)]
    assert [record.error for record in records] == [""] * 4 and seen == 4


@pytest.mark.parametrize(
    ("writes", "close", "error"),
    [
        ([HEAD + b"\r\n", CHUNK % b"a"], True, "incomplete"),
        ([HEAD + b"Content-Length: 9999\r\n\r\n", CHUNK % b"a"], True, "connection_lost"),
        ([], True, "connection_lost"),
        ([b"HTTP/1.1 garbage\r\n\r\n"], True, "connection_lost"),
        ([HEAD + b"\r\n", b"data: {no json\n\n"], True, "malformed_sse"),
        ([HEAD + b"\r\n", b'data: {"choices": 3}\n\n'], True, "malformed_sse"),
        ([HEAD + b"\r\n", b'data: "\xff"\n\n'], True, "malformed_sse"),
        ([b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"], True, "malformed_sse"),
        ([HEAD + b"\r\n", CHUNK % b"a", b'data: {"error": {"message": "no"}}\n\n'], True, "error_event"),
        ([HEAD + b"\r\n", LAST + b"data: [DONE]\n\n"], True, "empty"),
        ([HEAD + b"\r\n", CHUNK % b"a"], False, "timeout"),
        ([], False, "timeout"),
        ([b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nlate"], True, "http_429"),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], True, "http_500"),
    ],
)
async def test_kinds_of_errors(writes: list[bytes], close: bool, error: str) -> None:
    async with server(answering(*writes, close=close)) as pool:
        record = await ask(pool, timeout=0.3)
        assert (record.error, bool(record.detail)) == (error, error != "http_500")
        assert record.end >= record.sent >= 0
        assert record.retry_after == (3 if error == "http_429" else -1)


async def test_refused() -> None:
    async with server(answering()) as pool:
        pass
    assert (await ask(pool)).error == "connection_refused"


async def test_nothing_is_taken_after_an_error() -> None:
    async with server(answering(HEAD + b"\r\n", CHUNK % b"a" + b"data: {\n\n" + CHUNK % b"b" + LAST)) as pool:
        record = await ask(pool)
    assert (record.error, record.text) == ("malformed_sse", "a")


async def test_leaving_after_chunks_closes_the_connection() -> None:
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"\r\n")
        for _ in range(3):
            writer.write(CHUNK % b"a")
            await asyncio.sleep(0.02)
        await reader.read()
        left.set()

    async with server(handle) as pool:
        record = await ask(pool, Manner(leave_after_chunks=2))
        assert (record.error, len(record.chunks)) == ("", 2)
        await asyncio.wait_for(left.wait(), 5)


async def test_leaving_before_the_answer() -> None:
    async with server(answering(close=False)) as pool:
        record = await ask(pool, Manner(leave_after_chunks=1, leave_after_seconds=0.05))
    assert (record.error, record.chunks) == ("", []) and record.e2e == pytest.approx(0.05, abs=0.04)


async def test_a_slow_client_holds_the_server_up() -> None:
    """The server cannot get rid of its bytes faster than the client reads them."""
    big = CHUNK % (b"x" * 1000)
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.transport.set_write_buffer_limits(1000)
        writer.write(HEAD + b"\r\n")
        while True:
            writer.write(big)
            await writer.drain()
            sent += len(big)

    async with server(handle) as pool:
        record = await ask(pool, Manner(bytes_per_second=50_000), timeout=1.0)
    assert record.error == "timeout" and record.chunks
    assert 1000 * len(record.chunks) < 150_000 and sent < 10_000_000


@pytest.mark.parametrize(("status", "error"), [(400, ""), (422, ""), (500, "http_500"), (200, "accepted")])
async def test_bad_requests_must_be_refused(status: int, error: str) -> None:
    answer = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n{}" % status
    async with server(answering(answer)) as pool:
        assert (await ask(pool, Manner(expects_refusal=True))).error == error


@pytest.mark.parametrize(
    ("url", "path", "netloc"),
    [
        ("http://127.0.0.1:8000", "", "127.0.0.1:8000"),
        ("127.0.0.1:8000/v1/", "", "127.0.0.1:8000"),
        ("https://host/base/v1", "/base", "host"),
        ("http://[::1]:9", "", "[::1]:9"),
    ],
)
def test_addresses(url: str, path: str, netloc: str) -> None:
    address = parse_url(url)
    assert (address.path, address.netloc) == (path, netloc)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999"])
def test_no_addresses(url: str) -> None:
    with pytest.raises(BenchError):
        parse_url(url)


async def test_a_run_that_ends_marks_what_is_under_way() -> None:
    async with server(answering(HEAD + b"\r\n", CHUNK % b"a", close=False)) as pool:
        record = Record(id=0)
        answer = Answer(record, time.monotonic(), Manner(), keep_text=False)
        running = asyncio.create_task(
            answer.run(pool, request_bytes(pool.address, "POST", "/v1/completions", b"{}"), 5)
        )
        while not record.chunks:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (record.error, len(record.chunks)) == ("interrupted", 1) and record.end > 0
