"""The line between the routers of a cluster: a Redis stream in which each tells what it booked and released.

Redis is in no decision's way: news are gathered for some milliseconds and sent beside the placements. When it is lost,
each router goes on with what it knows. The end of a request is told to the others before its gateway has the answer,
unless that takes half a second: a router that dies in between has taken no end with it that nobody would tell again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from google.protobuf.message import DecodeError

from router.shared_load import SharedLoad
from services.redis_client import REDIS_ERRORS, redis_client

log = structlog.get_logger()

_GATHER_SECONDS = 0.005
_IDLE_SECONDS = 0.25
_WAIT_SECONDS = 0.5  # for entries
_AGAIN_SECONDS = 0.3  # after an error
_TIMEOUT_SECONDS = 2.0  # of a read, which waits for entries
_ENTRIES = 1024  # kept: who is further behind hears everything anew
_FIELD = b"m"


class News:
    """That a router has something to tell the others, and that it has told it."""

    def __init__(self) -> None:
        self._there = asyncio.Event()
        self._told = asyncio.Event()  # of what is new now; each telling has its own

    def add(self) -> asyncio.Event:
        """There is something new. The event is set when it was told, or could not be."""
        self._there.set()
        return self._told

    async def gather(self) -> asyncio.Event:
        """Returns some milliseconds after there is something new, or now and then: to be set when it was told."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._there.wait(), _IDLE_SECONDS)
            await asyncio.sleep(_GATHER_SECONDS)
        self._there.clear()
        told, self._told = self._told, asyncio.Event()
        return told


class LoadStream:
    """One router's connection to the stream of `cluster` at `url`.

    `news` says when `shared` has something to tell; `hear` gets what others told and raises MsgspecError or DecodeError
    for what it does not understand.
    """

    def __init__(self, url: str, cluster: str, shared: SharedLoad, news: News, hear: Callable[[bytes], None]) -> None:
        self._shared = shared
        self._stream = f"{cluster}:router-load"
        self._writer = redis_client(url)
        self._reader: Any = redis_client(url, _TIMEOUT_SECONDS)  # its types leave open what an answer is
        self._news = news
        self._take_in = hear
        self._closing = False
        self._cursor: bytes | None = None  # id of the last entry that was read; None: of those to come
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Tells and hears until `close`."""
        await asyncio.gather(self._repeat("tell", self._tell), self._repeat("hear", self._hear))

    async def close(self) -> None:
        """Disconnects."""
        self._closing = True
        for client in (self._writer, self._reader):
            with contextlib.suppress(*REDIS_ERRORS):
                await client.aclose()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        while not self._closing:  # a client library may swallow a cancellation
            try:
                await work()
            except REDIS_ERRORS as error:
                if not self._failing:
                    log.warning("routers do not hear each other; each places with what it knows", error=str(error))
                self._failing.add(what)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            if what in self._failing:
                self._failing.remove(what)
                if not self._failing:
                    log.info("routers hear each other again")

    async def _tell(self) -> None:
        told = await self._news.gather()
        message = self._shared.message(time.monotonic())
        try:
            if message is not None:
                await self._writer.xadd(self._stream, {_FIELD: message}, maxlen=_ENTRIES, approximate=True)
        except REDIS_ERRORS:
            self._shared.lost()
            raise
        finally:
            told.set()

    async def _hear(self) -> None:
        if self._cursor is None:
            self._cursor = await self._latest()
        found = await self._reader.xread({self._stream: self._cursor}, count=_ENTRIES, block=int(1e3 * _WAIT_SECONDS))
        if not found and _order(await self._latest()) < _order(self._cursor):
            self._cursor = b"0-0"  # the store came back empty, with a clock that is behind
        for _, entries in found:
            for self._cursor, fields in entries:
                try:
                    self._take_in(fields.get(_FIELD, b""))
                except (msgspec.MsgspecError, DecodeError) as error:
                    log.warning("a malformed message of a router dropped", error=str(error))
                await asyncio.sleep(0)  # requests are placed meanwhile

    async def _latest(self) -> bytes:
        """Id of the last entry."""
        entries = await self._reader.xrevrange(self._stream, count=1)
        return bytes(entries[0][0]) if entries else b"0-0"


def _order(entry: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
