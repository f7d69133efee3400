"""Headers that are too long, or do not come: the gateway's server does not wait for their end. And how it stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from services.gateway import http_protocol
from services.gateway.serve import _listen, _server


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.5)  # longer than headers may take
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


class Stoppable:
    """The gateway's server around `app`."""

    def __init__(self) -> None:
        listener = _listen("127.0.0.1", 0, "--port")
        self.address: tuple[str, int] = listener.getsockname()
        self._server = _server(app, 5.0)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._serving


@pytest.fixture
async def server() -> AsyncIterator[Stoppable]:
    running = Stoppable()
    yield running
    await running.stop()


@pytest.fixture
def address(server: Stoppable, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    monkeypatch.setattr(http_protocol, "_HEADER_SECONDS", 0.3)
    return server.address


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\n"])
async def test_late_headers_are_answered_408(address: tuple[str, int], begun: bytes) -> None:
    """Also on a connection that has been of use."""
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
    await asyncio.sleep(0.5)  # nothing is begun: nothing is late
    assert not reader.at_eof()
    writer.write(b"GET / HTTP/1.1\r\n")
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408 ")
    writer.close()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(begun)
    assert b"headers were not there" in await asyncio.wait_for(reader.read(), 5)
    writer.close()


@pytest.mark.parametrize("behind", [b"\r\n", b"GET / HT"])
async def test_nothing_is_late_in_the_midst_of_an_answer(address: tuple[str, int], behind: bytes) -> None:
    """Old clients send an empty line behind a body, others the beginning of the next request."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
    await asyncio.sleep(0.1)  # a segment of its own
    writer.write(behind)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 204 ")
    writer.close()


@pytest.mark.parametrize("piece", [b"x-long: " + b"a" * 4000, b"x: y\r\n" * 500])
async def test_long_headers_are_answered_431(address: tuple[str, int], piece: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):  # it is closed while we send
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def stops_listening(address: tuple[str, int]) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(*address)
            writer.close()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\n"])
async def test_a_connection_from_before_the_stop_has_its_one_request(server: Stoppable, begun: bytes) -> None:
    """One that is idle after an answer closes at once; one that says nothing is not waited for long."""
    (reader, writer), (idle, to_idle), (silent, to_silent) = [
        await asyncio.open_connection(*server.address) for _ in range(3)
    ]
    to_idle.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"connection: close" not in await idle.readuntil(b"\r\n\r\n")
    writer.write(begun)
    stopping = asyncio.create_task(server.stop())
    await asyncio.wait_for(stops_listening(server.address), 5)
    assert await asyncio.wait_for(idle.read(), 5) == b""
    writer.write((begun and b"host: x\r\n\r\n") or b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)  # to the end
    assert answer.startswith(b"HTTP/1.1 204 ") and b"connection: close\r\n" in answer
    assert (await asyncio.wait_for(silent.read(), 5)).startswith(b"HTTP/1.1 408 ")
    await asyncio.wait_for(stopping, 5)
    for each in (writer, to_idle, to_silent):
        each.close()
