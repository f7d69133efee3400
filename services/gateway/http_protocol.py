"""HTTP/1.1 on the wire: uvicorn's httptools protocol with bounds on a request's headers, in bytes and in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError

_MAX_HEADER_BYTES = 64 << 10
_HEADER_SECONDS = 10.0
_LAST_HEADER_SECONDS = 1.0  # once the server is told to stop
_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when the headers of a request go beyond 64 KiB, however they are cut, and 408 when they
    are not there 10 s after their first byte; a new connection has as long for that byte. When the server is told to
    stop, a new connection still has 1 s for one request: its client saw it open and knows of no reason to try again.
    """

    _stopping = False
    _reading_headers = True
    _header_bytes = 0
    _completed = False  # a request ended in the present piece
    _waiting: asyncio.TimerHandle | None = None  # for the end of headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client."""
        super().connection_made(transport)
        self._wait_for_headers(_HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._have_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._completed = False
        super().data_received(data)
        if self._completed or not self._reading_headers:
            return
        # In the midst of an answer nothing is late: clients may send an empty line behind a body.
        if self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_headers(_HEADER_SECONDS)
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, f"The headers are longer than {_MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """The body begins."""
        self._reading_headers = False
        self._have_headers()
        super().on_headers_complete()
        if self._stopping:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The next request may begin."""
        self._reading_headers, self._header_bytes, self._completed = True, 0, True
        super().on_message_complete()

    def shutdown(self) -> None:
        """The server stops: idle connections that have been of use close, what is under way is the last request."""
        if self._waiting is None:
            super().shutdown()
            return
        self._stopping = True
        self._have_headers()
        self._wait_for_headers(_LAST_HEADER_SECONDS)

    def _wait_for_headers(self, seconds: float) -> None:
        message = f"The headers were not there within {seconds:g} s"
        self._waiting = self.loop.call_later(seconds, self._refuse, 408, message)

    def _have_headers(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _refuse(self, status: int, message: str) -> None:
        """Answers, and closes."""
        self._have_headers()
        if self.transport.is_closing():
            return
        body = ApiError(status, message).body()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
