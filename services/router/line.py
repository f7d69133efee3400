"""Where requests stand in line while the cluster is full, and who lets the next one go."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial

from router.admission import Admission, Refused, Shed
from router.placer import Placer
from router.queue import Waiting
from router.saturation import kept_tokens
from router.shedding import Shedding
from router.snapshot import Ask
from services.attempts import is_first
from services.router.metrics import RouterMetrics, priority_class
from services.rpc import router_pb2

_COME_BACK_SECONDS = 30.0  # after which, at the latest, one that is refused for the planner may try again
_LOOK_SECONDS = 0.02  # between two looks for room, where nobody tells of any: prompts get computed


class Released(Exception):
    """The request was given up while it waited."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Ticket(Waiting):
    ask: Ask
    excluded: list[str]
    key: tuple[str, int]  # request id, attempt
    in_line: bool = True
    comes: asyncio.Event = field(default_factory=asyncio.Event)  # its turn, or word that it was released
    over: asyncio.Event = field(default_factory=asyncio.Event)  # its turn is


class Line:
    """Requests for one model, one after the other, each when there is room for it. While there is, nobody waits."""

    def __init__(self, placer: Placer, max_queue: int, slo_ttft: float, metrics: RouterMetrics) -> None:
        self._placer = placer
        self._admission: Admission[_Ticket] = Admission(max_queue, slo_ttft)
        self._queue = self._admission.queue  # of tickets
        self.shedding = Shedding()
        self._metrics = metrics
        self._tickets: dict[tuple[str, int], _Ticket] = {}
        self._ask = Ask(0, 0)  # the latest one: all are for one model
        self._freed = asyncio.Event()
        self._usher: asyncio.Task[None] | None = None  # as long as somebody waits

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """That they cost."""
        return self._queue.tokens

    @contextlib.asynccontextmanager
    async def turn(
        self, request: router_pb2.PlaceRequest, ask: Ask, on_wait: Callable[[], None]
    ) -> AsyncGenerator[float]:
        """The request may be placed: seconds that it waited. If it is cancelled before, it leaves.

        `on_wait` is called when it begins to wait.

        Raises Refused, Released.
        """
        now = time.monotonic()
        if is_first(request.request_id, request.attempt) and self.shedding.refuses(request.priority, now):
            self._metrics.shed.labels(Shed.EXCESS.value).inc()
            message = f"{100 * self.shedding.share(now):.0f} % of the requests are more than all workers can do in time"
            raise Refused(Shed.EXCESS, message, min(self.shedding.remaining(now), _COME_BACK_SECONDS))
        if not len(self._queue) and self._placer.has_room(ask, request.exclude_incarnations, now):
            yield 0.0
            return
        ticket = self._enter(request, ask, now)
        try:
            on_wait()
            await ticket.comes.wait()
            if self._tickets.get(ticket.key) is not ticket:
                raise Released
            waited = time.monotonic() - now
            self._metrics.queue_seconds.labels(priority_class(request.priority)).observe(waited)
            yield waited
        finally:
            self._leave(ticket)
            ticket.over.set()

    def freed(self) -> None:
        """There may be room."""
        self._freed.set()

    def release(self, request_id: str, attempt: int) -> None:
        """The attempt is given up: if it waits, it waits no more."""
        if ticket := self._tickets.get((request_id, attempt)):
            self._leave(ticket)
            ticket.comes.set()

    # Inside

    def _enter(self, request: router_pb2.PlaceRequest, ask: Ask, now: float) -> _Ticket:
        remaining = request.deadline_seconds if request.deadline_seconds > 0 else math.inf
        ticket = _Ticket(
            tenant=request.tenant,
            weight=request.weight or 1.0,
            priority=request.priority,
            tokens=kept_tokens(ask),
            deadline=now + remaining,
            resumes=request.attempt > 0,
            ask=ask,
            excluded=list(request.exclude_incarnations),
            key=(request.request_id, request.attempt),
        )
        try:
            workers, queued = self._placer.workers(ask, ()), self._placer.reservations.queued(now)
            self._admission.enter(ticket, ask, workers, queued, now)
        except Refused as error:
            self._metrics.shed.labels(error.why.value).inc()
            raise
        if before := self._tickets.get(ticket.key):  # asked again: nobody hears the first answer
            self._leave(before)
            before.comes.set()
        self._tickets[ticket.key] = ticket
        self._ask = ask
        if self._usher is None or self._usher.done():
            self._usher = asyncio.get_running_loop().create_task(self._let_go(), context=Context())
        return ticket

    def _leave(self, ticket: _Ticket) -> None:
        if self._tickets.get(ticket.key) is ticket:
            del self._tickets[ticket.key]
        if ticket.in_line:
            ticket.in_line = False
            self._queue.remove(ticket)
            self._freed.set()

    async def _let_go(self) -> None:
        """One by one, so that each finds the bookings of those before it."""
        while len(self._queue):
            now = time.monotonic()
            self._freed.clear()
            ticket = self._queue.first(now, self._admission.rate(self._placer.workers(self._ask, ()), now))
            if self._placer.has_room(ticket.ask, ticket.excluded, now):
                self._admission.take(ticket, now)
                ticket.in_line = False
                ticket.comes.set()
                await ticket.over.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _LOOK_SECONDS)


class Lines:
    """A line for each model, so that none waits for another's workers."""

    def __init__(self, placer: Placer, max_queue: int, slo_ttft: float, metrics: RouterMetrics) -> None:
        self._make = partial(Line, placer, max_queue, slo_ttft, metrics)
        self._lines: dict[int | None, Line] = {}  # by the model's number
        metrics.queue_requests.set_function(lambda: len(self))
        metrics.queue_tokens.set_function(lambda: sum(line.tokens for line in self._lines.values()))

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._lines.values()))

    def waiting_for(self, model: int) -> int:
        """Requests that wait for this model."""
        return len(self._lines.get(model, ()))

    def turn(
        self, request: router_pb2.PlaceRequest, ask: Ask, on_wait: Callable[[], None]
    ) -> contextlib.AbstractAsyncContextManager[float]:
        """As `Line.turn`, in the line of the request's model."""
        return self._line(ask.model).turn(request, ask, on_wait)

    def shed(self, model: int, share: float, seconds: float) -> None:
        """For so long this part of the model's requests is refused; 0: none any more."""
        self._line(model).shedding.ask(share, time.monotonic() + seconds)

    def shed_share(self, model: int) -> float:
        """The part of the model's requests that is refused."""
        return self._line(model).shedding.share(time.monotonic())

    def freed(self) -> None:
        """There may be room."""
        for line in self._lines.values():
            line.freed()

    def release(self, request_id: str, attempt: int) -> None:
        """The attempt is given up: if it waits, it waits no more."""
        for line in self._lines.values():
            line.release(request_id, attempt)

    def _line(self, model: int | None) -> Line:
        if model not in self._lines:
            self._lines[model] = self._make()
        return self._lines[model]
