"""A lean HTTP/1.1 client for many long streams: httptools parses, one object a connection, time taken on arrival.

It follows no redirects and asks for no compression: what is measured is the server that was named.
"""

import asyncio
import socket
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.errors import BenchError


class Address(msgspec.Struct, frozen=True):
    """Where requests go."""

    host: str
    port: int
    tls: bool
    path: str  # before /v1/...

    @property
    def netloc(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """The address of a server. A trailing /v1 is the same as none. Raises BenchError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise BenchError(
            f"{url!r} is not the address of a server ({error}); write e.g. http://127.0.0.1:8000"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"{url!r} is not the address of a server; write e.g. http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), tls, path)


def request_bytes(address: Address, method: str, path: str, body: bytes = b"", api_key: str = "") -> bytes:
    """A whole request, head and body."""
    lines = [f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.netloc}", "User-Agent: tandem-bench"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Exchange(Protocol):
    """What a connection tells about the answer to one request. `now` is time.monotonic() of the arrival."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers, names in lower case."""

    def on_body(self, data: bytes, now: float) -> None:
        """A piece of the body."""

    def on_end(self, now: float) -> None:
        """The answer is complete."""

    def on_lost(self, error: Exception | None, now: float) -> None:
        """The connection ended before the answer did."""


class Connection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self) -> None:
        self.reused = False
        self.answered = False  # something came back for the current request
        self.closed = False
        self.exchange: Exchange | None = None
        self.pool: Pool | None = None
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self._until_close = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def send(self, data: bytes, exchange: Exchange) -> None:
        """Sends a request; its answer goes to `exchange`."""
        self.exchange = exchange
        self.answered = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._now = time.monotonic()
        self.answered = True
        if self.exchange is None:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        sized = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "").lower()
        self._until_close = not sized and status >= 200
        if self.exchange is not None and status >= 200:
            self.exchange.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if self.exchange is not None:
            self.exchange.on_body(data, self._now)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() < 200:
            return
        exchange, self.exchange = self.exchange, None
        if self.pool is not None and self._parser.should_keep_alive() and not self.closed:
            self.reused = True
            self.pool.idle.append(self)
        else:
            self.abort()
        if exchange is not None:
            exchange.on_end(self._now)

    def eof_received(self) -> bool:
        """Called by the loop."""
        if self._until_close and self.answered and self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.on_end(time.monotonic())
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        self._now = time.monotonic()
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self.abort()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_lost(error, self._now)

    def abort(self) -> None:
        """Closes at once; the answer under way, if any, is told nothing more by the server."""
        if not self.closed:
            self.closed = True
            self._transport.abort()

    def pause(self, seconds: float) -> None:
        """Reads nothing for a while."""
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self.closed:
            self._transport.resume_reading()


class Pool:
    """Connections to one address, kept open between requests."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def acquire(self) -> Connection:
        """An idle connection or a new one. Raises OSError."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.closed:
                return connection
        connection = await self.connect()
        connection.pool = self
        return connection

    async def connect(self, receive_buffer: int = 0) -> Connection:
        """A connection of one's own; `receive_buffer` bounds what the kernel takes ahead of the reader, in bytes."""
        loop = asyncio.get_running_loop()
        if not receive_buffer:
            _, connection = await loop.create_connection(
                Connection, self.address.host, self.address.port, ssl=self._tls
            )
            return connection
        found = await loop.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        raw = socket.socket(family, kind, protocol)
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await loop.sock_connect(raw, where)
        except BaseException:
            raw.close()
            raise
        name = self.address.host if self._tls else None
        _, connection = await loop.create_connection(Connection, sock=raw, ssl=self._tls, server_hostname=name)
        return connection

    def close(self) -> None:
        """Closes what is idle."""
        for connection in self.idle:
            connection.abort()
        self.idle.clear()
