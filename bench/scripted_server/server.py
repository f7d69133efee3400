"""The server's HTTP."""

import asyncio
from typing import cast

import httptools
import msgspec

from bench.scripted_server.api import decode_ask, error, response, whole
from bench.scripted_server.stream import Log, Stream


class Connection(asyncio.Protocol):
    """Reads requests, one at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._transport: asyncio.Transport
        self._stream: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._url = b""
        self._body = b""

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser."""
        path = self._url.partition(b"?")[0].decode("latin-1")
        match self._parser.get_method(), path:
            case b"GET", "/health":
                self._transport.write(response(200, b"{}"))
            case b"GET", "/v1/models":
                model = {"id": self._log.script.model, "object": "model", "created": 0, "owned_by": "bench"}
                self._transport.write(response(200, msgspec.json.encode({"object": "list", "data": [model]})))
            case b"POST", "/v1/completions" | "/v1/chat/completions":
                self._answer(path)
            case _:
                self._transport.write(error(404, f"no such path: {path}"))

    def _answer(self, path: str) -> None:
        try:
            ask = decode_ask(self._body)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            self._transport.write(error(400, str(problem)))
            return
        if ask.model != self._log.script.model:
            self._transport.write(error(404, f"no such model: {ask.model}"))
        elif (ask.messages if path == "/v1/chat/completions" else ask.prompt) is None:
            self._transport.write(error(400, "nothing to answer"))
        elif ask.stream:
            stream = Stream(self._transport, self._log, self._log.next(path, ask), ask)
            self._stream = asyncio.get_running_loop().create_task(stream.run())
        else:
            self._transport.write(whole(ask))
