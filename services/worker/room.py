"""Room for KV that peers will write: who gets it next when the pool is full.

By priority, then by arrival, and nobody passes one that waits: else a stream of small requests would keep a large one
out for ever. However long it takes, the prompt is not computed here instead: a full worker has decodes to go on with.
Meanwhile the KV service reads into host memory what the request will ask for and it has further away.
"""

import asyncio
import bisect
import itertools
import time
from dataclasses import dataclass, field
from functools import partial

from engine.engine import Reservation
from engine.hashing import block_hashes, root_hash
from engine.request import HOST, Request
from kv_transfer.messages import PrefixSource
from services.read_ahead import ReadAhead
from services.security import ClusterKey
from services.worker.engine_thread import EngineThread
from services.worker.metrics import WorkerMetrics
from services.worker.timelines import Timeline


@dataclass(frozen=True, order=True, slots=True)
class Turn:
    """A request that wants room; the lowest goes first."""

    priority: int
    ticket: int
    comes: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


class Room:
    """Reservations in the engine, in order. Lives on the event loop; attempts run on the engine thread, one by one."""

    def __init__(self, engine: EngineThread, metrics: WorkerMetrics, key: ClusterKey | None) -> None:
        self.waiting = 0  # requests that found no room
        self._engine = engine
        self._metrics = metrics
        self._ahead = ReadAhead(key)
        self._tickets = itertools.count()
        self._turns: list[Turn] = []  # next one first
        self._refused: set[Turn] = set()  # belongs to the engine thread: those that found no room

    async def reserve(self, request: Request, timeline: Timeline, source: PrefixSource | None) -> Reservation:
        """Blocks for the request's KV. Raises TimeoutError at its deadline, ValueError if it cannot ever run.

        `source`: from where its prefix will be fetched.
        """
        started, waits = time.monotonic(), False
        turn = Turn(request.priority, next(self._tickets))
        bisect.insort(self._turns, turn)
        try:
            while (reservation := await self._engine.call(partial(self._attempt, request, turn))) is None:
                if not waits:
                    waits = True
                    self._count(1)
                    timeline.mark("waits for blocks")
                    self.read_ahead(request, source)
                async with asyncio.timeout(max(0.0, request.deadline - time.monotonic())):
                    await turn.comes.wait()
                turn.comes.clear()
            return reservation
        finally:
            if waits:
                self._count(-1)
                self._metrics.credit_wait_seconds.observe(time.monotonic() - started)
            self._turns.remove(turn)
            self._engine.post(partial(self._refused.discard, turn))
            self.freed()  # perhaps there is room for the next, too

    def freed(self) -> None:
        """Blocks may be free: the next request tries again."""
        if self._turns:
            self._turns[0].comes.set()

    def read_ahead(self, request: Request, source: PrefixSource | None) -> None:
        """The request waits: what it will fetch from a tier beneath host memory is to come nearer."""
        if source is None or source.tier in ("", HOST):
            return
        engine = self._engine.engine
        spec, salt = engine.kv_cache.spec, request.cache_salt
        root = root_hash(fingerprint=engine.fingerprint, layout=spec.layout, block_size=spec.block_size, salt=salt)
        tokens = (request.prompt_token_ids + request.output_token_ids)[: source.tokens]
        self._ahead.ask(source.address, block_hashes(tokens, spec.block_size, root))

    def _count(self, change: int) -> None:
        self.waiting += change
        self._metrics.credits_waiting.set(self.waiting)

    def _attempt(self, request: Request, turn: Turn) -> Reservation | None:
        """Engine thread."""
        passes_none = min(self._refused, default=turn) >= turn
        reservation = self._engine.engine.reserve(request) if passes_none else None
        if reservation is None:
            self._refused.add(turn)
        return reservation
