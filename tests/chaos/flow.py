"""One direction of a stream with faults: units in, units out, as a coroutine that both proxies run."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from chaos.faults import Faults

Write = Callable[[bytes], Awaitable[None]]


class Cut(Exception):
    """The stream is to be torn down."""


class Flow:
    """Passes units on to `write`, with the faults that are drawn for `place`."""

    def __init__(self, faults: Faults, place: str, write: Write, transfer_of: Callable[[bytes], str]) -> None:
        self._faults = faults
        self._place = place
        self._write = write
        self._transfer_of = transfer_of
        self._held: bytes | None = None  # changes places with the next unit
        self._swallows = False
        self._late: set[asyncio.Task[None]] = set()

    async def pass_on(self, unit: bytes) -> None:
        """Raises Cut when the stream is to end here."""
        if self._swallows:
            return
        kind = self._faults.draw(self._place) if unit else None
        dice = self._faults.random
        match kind:
            case "delay":
                self._count(kind, unit)
                await asyncio.sleep(dice.choice((0.003, 0.02, 0.1)))
                await self._release(unit)
            case "cut":
                self._count(kind, unit)
                raise Cut
            case "half-open":  # the socket stays, nothing is read any more
                self._count(kind, unit)
                await asyncio.sleep(dice.uniform(0.2, 1.5))
                raise Cut
            case "corrupt" | "truncate":
                self._count(kind, unit)
                await self._release(self._faults.damage(unit, kind))
            case "duplicate":
                self._count(kind, unit)
                await self._release(unit, unit)
            case "reorder" if self._held is None:
                self._held = unit
                self._later(0.05, self._release)  # if no other comes
            case "replay":
                await self._release(unit)
                self._later(dice.choice((0.01, 0.1, 0.5, 2.0)), partial(self._replay, unit))
            case "drop":
                self._count(kind, unit)
            case "swallow":  # this unit and all that follow, for ever; the stream stays
                self._count(kind, unit)
                self._swallows = True
            case _:
                await self._release(unit)

    def stop(self) -> None:
        """Drops what is late."""
        for task in self._late:
            task.cancel()

    async def _release(self, *units: bytes) -> None:
        """Writes the units, and then the one that was held back for them."""
        held, self._held = self._held, None
        if self._swallows:
            return
        for unit in units:
            await self._write(unit)
        if held is not None:
            if units:
                self._count("reorder", held)
            await self._write(held)

    async def _replay(self, unit: bytes) -> None:
        if self._swallows:
            return
        await self._write(unit)
        self._count("replay", unit)

    def _later(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await work()

        task = asyncio.ensure_future(wait())
        self._late.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # the stream went away meanwhile

    def _count(self, kind: str, unit: bytes) -> None:
        self._faults.count(self._place, kind, self._transfer_of(unit))
