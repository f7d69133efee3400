"""What the console serves on the admin port: the page, the state as JSON and as a stream, and the API for its chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from services.gateway.console.state import LiveState
from services.gateway.decisions import Decisions
from services.gateway.errors import ApiError

_DECISIONS = 60  # of the planner, in the page as it loads
_SECONDS = 1.0  # between two events of a stream
_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_API = ("/v1/chat/completions", "/v1/models")
# The page loads nothing from elsewhere, runs no script but its own, and no other page may frame it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_encode = msgspec.json.Encoder().encode


class Console:
    """The routes. `api`: serves the OpenAI API to whoever may be here."""

    def __init__(self, state: LiveState, decisions: Decisions, api: ASGIApp) -> None:
        self._state = state
        self._decisions = decisions
        self._api = api
        self._closed = asyncio.Event()

    def routes(self) -> list[BaseRoute]:
        """For the admin port."""
        return [
            Route("/api/live", self._live),
            Route("/api/live/stream", self._stream),
            Route("/state.js", self._script),
            *(Route(path, self._api) for path in _API),
            *(_file(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES),
        ]

    def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        self._closed.set()

    async def _live(self, _request: Request) -> Response:
        """The state of the cluster."""
        return Response(_encode(await self._state.live()), headers=_HEADERS, media_type="application/json")

    async def _script(self, _request: Request) -> Response:
        """The same for the page as it loads, so that it is never empty."""
        try:
            decisions = await self._decisions.latest(_DECISIONS)
        except ApiError:
            decisions = b"{}"
        script = b"const first = " + _encode(await self._state.live()) + b", decisions = " + decisions + b";"
        return Response(script, headers=_HEADERS | {"content-type": _TYPES[".js"]})

    async def _stream(self, _request: Request) -> Response:
        """The same once a second."""
        return StreamingResponse(self._events(), headers=_HEADERS, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        while not self._closed.is_set():
            yield b"data: " + _encode(await self._state.live()) + b"\n\n"
            try:
                await asyncio.wait_for(self._closed.wait(), _SECONDS)
            except TimeoutError:
                continue


def _file(path: Path) -> Route:
    """A file of the page; index.html is the root."""
    content = path.read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(content, headers=_HEADERS | {"content-type": _TYPES[path.suffix]})

    return Route("/" if path.name == "index.html" else f"/{path.name}", serve)
