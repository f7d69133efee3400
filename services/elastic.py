"""Workers that `tandem up` starts and ends while it runs, as the planner wishes: processes here, or actors on Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from services.parts import WORKER_ROLES, Part, named
from services.planner.wanted import Wanted, Wish
from services.redis_client import REDIS_ERRORS
from services.supervisor import Child, Supervisor

log = structlog.get_logger()

_POLL_SECONDS = 0.5


class Workers(Protocol):
    """Who runs workers."""

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Role and model of each worker that there was at the start."""
        ...

    @property
    def models(self) -> dict[str, str]:
        """By the name of each worker that runs, starts, or is about to end: its model."""
        ...

    async def run(self, name: str, role: str, like: int) -> None:
        """Starts one more, of this role and otherwise like one of `kinds`. OSError if that cannot be done now."""
        ...

    def end(self, name: str) -> None:
        """Has one drain and end, however long it takes, and not start again."""
        ...


class Wishes:
    """Brings workers to what is wished, again and again.

    A new worker is like the first one of its role and model, or like any of its model. `most`: workers that there may
    be of a model; 0: as many as it had at the start. So nobody who can write to the cluster state fills the machine.
    """

    def __init__(self, wanted: Wanted, workers: Workers, most: int) -> None:
        self._wanted = wanted
        self._workers = workers
        self._most = most

    async def follow(self) -> None:
        """Until cancelled."""
        told = ""
        try:
            while True:
                try:
                    await self._fulfil(await self._wanted.all())
                    told = ""
                except REDIS_ERRORS as error:
                    if str(error) != told:  # it is tried again and again
                        log.warning("wishes cannot be read, or a worker cannot be started", error=str(error))
                    told = str(error)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await self._wanted.close()

    async def _fulfil(self, wishes: dict[str, Wish]) -> None:
        for name, wish in wishes.items():
            models = self._workers.models
            if wish.what == "end" and name in models:
                self._workers.end(name)
            elif wish.what == "run" and name not in models and (like := self._like(wish)) is not None:
                await self._workers.run(name, wish.role, like)

    def _like(self, wish: Wish) -> int | None:
        """What the worker is like. None: there is no such model here, or it has enough workers."""
        alike = [number for number, (_, model) in enumerate(self._workers.kinds) if model == wish.model]
        running = sum(model == wish.model for model in self._workers.models.values())
        if wish.role not in WORKER_ROLES or not alike or running >= (self._most or len(alike)):
            return None
        return next((number for number in alike if self._workers.kinds[number][0] == wish.role), alike[0])


class ChildWorkers:
    """Workers that are the supervisor's children. `parts`: those of the start; `child(name, part)`: a process."""

    def __init__(self, supervisor: Supervisor, parts: list[Part], child: Callable[[str, Part], Child]) -> None:
        self._supervisor = supervisor
        of_start = [(name, part) for name, part in named(parts) if part.role in WORKER_ROLES]
        self._parts = [part for _, part in of_start]
        self._models = {name: _model(part) for name, part in of_start}
        self._child = child

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """As `Workers` says."""
        return [(part.role, _model(part)) for part in self._parts]

    @property
    def models(self) -> dict[str, str]:
        """As `Workers` says; what is no worker is left out, so that nobody wishes a router away."""
        names = {each.name for each in self._supervisor.children}
        return {name: model for name, model in self._models.items() if name in names}

    async def run(self, name: str, role: str, like: int) -> None:
        """As `Workers` says."""
        part = self._parts[like]
        await self._supervisor.add(self._child(name, Part(role, part.own, part.model)))
        self._models[name] = _model(part)

    def end(self, name: str) -> None:
        """As `Workers` says."""
        self._supervisor.remove(next(each for each in self._supervisor.children if each.name == name))


def _model(part: Part) -> str:
    return str(part.own.get("model_name"))
