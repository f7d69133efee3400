"""The ASGI response that runs a generation: one JSON body, or a stream of server-sent events.

The status goes out with the first tokens, so whatever fails before them is an HTTP error. In a stream, all deltas that
are there at the same time go out in one write. When the client leaves, the generation is stopped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.choice import Choice, Delta
from services.gateway.errors import ApiError, internal
from services.gateway.generation import Generation
from services.gateway.metrics import RequestRecord
from services.gateway.pins import PIN_HEADER

log = structlog.get_logger()

TIMING_HEADER = b"x-tandem-timing"  # asks what the request spent its time on: a header, or a comment before [DONE]
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]
_encode = msgspec.json.Encoder().encode


class GenerationResponse(Response):
    """Runs `generation`. `release` is called once, at the end. `pinned`: the value of its pin header, soon."""

    def __init__(
        self,
        generation: Generation,
        record: RequestRecord,
        release: Callable[[], None],
        pinned: asyncio.Task[str] | None = None,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._record = record
        self._release = release
        self._pinned = pinned
        self._is_timed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answers, unless the client leaves first."""
        self._is_timed = any(name == TIMING_HEADER for name, _ in scope["headers"])
        answer = self._stream if self._generation.plan.options.stream else self._whole
        plan = self._generation.plan
        self._record.accepted(plan.card.name, sum(map(len, plan.prompts)), len(self._generation.choices))
        work = asyncio.create_task(answer(scope, receive, send))
        left = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._record.outcome = "cancelled"
        finally:
            for task in (work, left):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(work, left, return_exceptions=True)
            self._record.moved(self._generation.moves)
            self._generation.ended(self._record.arrival, self._record.outcome or "ok")
            self._release()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        plan = generation.plan
        gathered = [Delta("", [], None) for _ in generation.choices]
        try:
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for batch in deltas:
                    for choice, delta in batch:
                        self._count(choice)
                        whole = gathered[choice.index]
                        whole.text += delta.text
                        whole.pieces += delta.pieces
                        whole.finish_reason = delta.finish_reason
        except ApiError as error:
            self._record.failed(error.status)
            await error.response()(scope, receive, send)
            return
        choices = list(zip(generation.choices, gathered, strict=True))
        body = plan.format.body(plan.head, choices, generation.usage())
        headers = {"server-timing": self._timing()} if self._is_timed else {}
        if self._pinned is not None:
            headers[PIN_HEADER] = await self._pinned
        await Response(_encode(body), headers=headers, media_type="application/json")(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        plan = generation.plan
        prefix = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            _encode(plan.head.request_id),
            _encode(plan.format.chunk_object),
            plan.head.created,
            _encode(plan.head.model),
        )
        opened: set[int] = set()
        started = False
        try:
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for batch in deltas:
                    events = []
                    for choice, delta in batch:
                        self._count(choice)
                        if choice.index not in opened:
                            opened.add(choice.index)
                            events += plan.format.opening(choice)
                        if delta.text or delta.pieces or delta.finish_reason is not None:
                            events.append(plan.format.chunk(choice, delta))
                    if not events:
                        continue
                    if not started:
                        started = True
                        headers = list(_SSE_HEADERS)
                        if self._pinned is not None:
                            headers.append((PIN_HEADER.encode(), (await self._pinned).encode()))
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    end = self._chunk_end()
                    await _send(send, b"".join(prefix + _encode(event) + end for event in events))
        except Exception as error:
            failure = error if isinstance(error, ApiError) else internal()
            if failure is not error:
                log.exception("a stream failed", request=plan.head.request_id)
            self._record.failed(failure.status)
            if not started:
                await failure.response()(scope, receive, send)
                return
            await _send(send, b"data: " + failure.body() + b"\n\n", last=True)
            return
        if plan.options.include_usage:
            await _send(send, prefix + b'],"usage":' + _encode(generation.usage()) + b"}\n\n")
        if self._is_timed:
            await _send(send, b": server-timing " + self._timing().encode() + b"\n\n")
        await _send(send, b"data: [DONE]\n\n", last=True)

    def _timing(self) -> str:
        return self._generation.waterfall(self._record.arrival, "ok").server_timing()

    def _chunk_end(self) -> bytes:
        options = self._generation.plan.options
        if options.continuous_usage:
            return b'],"usage":' + _encode(self._generation.usage()) + b"}\n\n"
        return b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"

    def _count(self, choice: Choice) -> None:
        self._record.tokens(choice.index, choice.num_tokens)
        if choice.finish_reason is not None:
            self._record.finished(choice.index)


async def _send(send: Send, data: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
