"""One request: sends it, takes the time of every chunk of its answer, and says how it ended."""

import asyncio
import errno
import time

import msgspec

from bench.load.http import Connection, Pool
from bench.load.sse import Chunk, EventParser, decode_chunk
from bench.measure.record import INTERRUPTED, Record

_DETAIL = 500  # characters of an error that are kept
_SLOW_BUFFER = 4096  # bytes that the kernel takes for a slow client


class Manner(msgspec.Struct, frozen=True):
    """How a client behaves. The default reads everything at once."""

    leave_after_chunks: int = 0  # hangs up when so many chunks have come; 0: stays
    leave_after_seconds: float = 0.0  # hangs up so long after sending; 0: stays
    bytes_per_second: float = 0.0  # reads slowly; 0: does not
    expects_refusal: bool = False  # the request is bad: a status 4xx is right, all else is wrong


class Answer:
    """Fills a record while the answer comes. Use it for one request only."""

    def __init__(self, record: Record, origin: float, manner: Manner, keep_text: bool) -> None:
        """`origin`: time.monotonic() of the start of the run."""
        self.record = record
        self.text: list[str] = []
        self._origin = origin
        self._manner = manner
        self._keep_text = keep_text
        self._events = EventParser()
        self._plain = b""  # body of an answer that is no stream
        self._streams = False
        self._finished = False  # [DONE] came
        self._sent = 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection: Connection | None = None  # while the answer is under way
        self._lost = asyncio.Event()
        self._why_lost = ""

    async def run(self, pool: Pool, request: bytes, timeout: float) -> None:
        """Sends the request and returns when its answer has ended, in whatever way."""
        loop = asyncio.get_running_loop()
        self._sent = time.monotonic()
        self.record.sent = self._sent - self._origin
        timers = [loop.call_later(timeout, self._fail, "timeout", f"no complete answer within {timeout:g} s")]
        if self._manner.leave_after_seconds:
            timers.append(loop.call_later(self._manner.leave_after_seconds, self._leave))
        sending = asyncio.create_task(self._send(pool, request))
        try:
            await asyncio.wait({self._over})  # which, unlike awaiting it, leaves it open when this is cancelled
        except asyncio.CancelledError:
            self._fail(INTERRUPTED, "the run was ended")
            raise
        finally:
            sending.cancel()
            for timer in timers:
                timer.cancel()

    async def _send(self, pool: Pool, request: bytes) -> None:
        """Sends until a connection was lost while the answer was under way, or the answer has ended."""
        try:
            connection = await (pool.connect(_SLOW_BUFFER) if self._manner.bytes_per_second else pool.acquire())
            while True:
                self._lost.clear()
                self._connection = connection
                connection.send(request, self)
                await self._lost.wait()
                # A server may close an idle connection just when it is used again: it never read the request.
                if not connection.reused or connection.answered:
                    self._fail("connection_lost", self._why_lost)
                    return
                connection = await pool.connect()
        except OSError as error:
            self._fail(_kind(error), str(error))

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Of Exchange."""
        self.record.status = status
        self._streams = status == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if (wait := headers.get("retry-after", "")).isdigit():
            self.record.retry_after = float(wait)

    def on_body(self, data: bytes, now: float) -> None:
        """Of Exchange."""
        if not self._streams:
            self._plain += data
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._finished = True
                continue
            try:
                chunk = decode_chunk(event)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._fail("malformed_sse", f"{error}: {event[:200]!r}")
                return
            self._take(chunk, now)
            if self._over.done():
                return
        if self._manner.bytes_per_second and self._connection is not None:
            self._connection.pause(len(data) / self._manner.bytes_per_second)

    def _take(self, chunk: Chunk, now: float) -> None:
        record = self.record
        if bytes(chunk.error) != b"null":
            self._fail("error_event", bytes(chunk.error).decode("utf-8", "replace"))
            return
        if chunk.usage is not None:
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.completion_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            if details is not None and details.cached_tokens is not None:
                record.cached_tokens = details.cached_tokens
        for choice in chunk.choices or ():
            if choice.carries_output:
                record.chunks.append(now - self._sent)
                if self._keep_text:
                    self.text.append(choice.piece)
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
        if 0 < self._manner.leave_after_chunks <= len(record.chunks):
            self._leave()

    def on_end(self, now: float) -> None:
        """Of Exchange."""
        record = self.record
        record.end = now - self._origin
        self._connection = None
        if self._manner.expects_refusal:
            if not 400 <= record.status < 500:
                self._fail("accepted" if record.status == 200 else f"http_{record.status}", "a bad request")
        elif record.status != 200:
            self._fail(f"http_{record.status}", self._plain.decode("utf-8", "replace"))
        elif not self._streams:
            self._fail("malformed_sse", "the answer is no event stream: " + self._plain.decode("utf-8", "replace"))
        elif not self._finished and not record.finish_reason:
            self._fail("incomplete", "the stream ended without finish_reason and without [DONE]")
        elif not record.chunks and record.completion_tokens <= 0:
            self._fail("empty", "the answer has no text")
        self._finish()

    def on_lost(self, error: Exception | None, now: float) -> None:
        """Of Exchange."""
        self._connection = None
        self._why_lost = str(error) if error else "the server closed the connection"
        self._lost.set()

    def _leave(self) -> None:
        """Hangs up, as this client means to."""
        if not self._over.done():
            self.record.end = time.monotonic() - self._origin
            self._hang_up()
            self._finish()

    def _fail(self, kind: str, detail: str) -> None:
        if self._over.done() or self.record.error:
            return
        self.record.error = kind
        self.record.detail = detail[:_DETAIL]
        self.record.end = time.monotonic() - self._origin
        self._hang_up()
        self._finish()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.abort()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


def _kind(error: OSError) -> str:
    """Kind of an error in connecting."""
    if isinstance(error, ConnectionRefusedError) or error.errno == errno.ECONNREFUSED:
        return "connection_refused"
    return "connection_failed"
