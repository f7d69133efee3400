"""Who starts and ends workers for the planner. Flips need nobody: workers change their roles themselves."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

from planner.window import Role, Worker
from services.cluster_state import ClusterState
from services.planner.wanted import Wanted
from services.rpc import cluster_pb2


class ActuatorFailed(Exception):
    """An action could not be carried out; the next decision starts from what is really there."""


class Actuator(Protocol):
    """Adds and removes workers. Nothing waits until they are there or gone: later windows show that.

    Methods raise ActuatorFailed, or one of REDIS_ERRORS where the cluster state does not answer.
    """

    async def starting(self, model: str) -> list[Worker]:
        """Workers of a model that were asked for and have not joined the cluster yet."""
        ...

    async def add(self, model: str, role: Role) -> None:
        """Asks for one worker more."""
        ...

    async def remove(self, name: str, member: cluster_pb2.Member | None) -> None:
        """Has a worker drain and end, or, without `member`, not start."""
        ...

    async def close(self) -> None:
        """Disconnects."""
        ...


class NoActuator:
    """Nobody starts or ends workers here: only flips are carried out."""

    async def starting(self, model: str) -> list[Worker]:
        """None are asked for."""
        return []

    async def add(self, model: str, role: Role) -> None:
        """Raises ActuatorFailed."""
        raise ActuatorFailed(f"nobody starts workers for the planner here: start a {role} worker of {model} yourself")

    async def remove(self, name: str, member: cluster_pb2.Member | None) -> None:
        """Raises ActuatorFailed."""
        raise ActuatorFailed(f"nobody ends workers for the planner here: `tandem drain {name} --leave`, and stop it")

    async def close(self) -> None:
        """There is nothing to do."""


class LocalActuator:
    """Asks `tandem up`, by wishes in the cluster state."""

    def __init__(self, state: ClusterState, wanted: Wanted) -> None:
        self._state = state
        self._wanted = wanted
        self._missed: dict[str, float] = {}  # workers that were there once, and since when each is not, unix seconds
        state.on_change(self._heard)

    async def starting(self, model: str) -> list[Worker]:
        """Those wished for that are no members yet."""
        there = {member.name for member in self._state.members()}
        return [
            Worker(name=name, role=wish.role, state="starting", since=max(wish.since, self._missed.get(name, 0.0)))
            for name, wish in (await self._wanted.all()).items()
            if wish.what == "run" and wish.model == model and name not in there
        ]

    async def add(self, model: str, role: Role) -> None:
        """Wishes for one under a name that nobody has."""
        taken = {member.name for member in self._state.members()}
        taken |= {name for name, wish in (await self._wanted.all()).items() if wish.what == "run"}
        name = next(name for number in itertools.count() if (name := f"{role}-{number}") not in taken)
        await self._wanted.run(name, model, role)

    async def remove(self, name: str, member: cluster_pb2.Member | None) -> None:
        """Wishes it away."""
        wish = (await self._wanted.all()).get(name)
        model = member.model.name if member is not None else wish.model if wish is not None else ""
        await self._wanted.end(name, model, wish.role if wish is not None else "aggregated")

    async def close(self) -> None:
        """Disconnects."""
        await self._wanted.close()

    def _heard(self, change: str, member: cluster_pb2.Member) -> None:
        if change == "left":
            self._missed[member.name] = time.time()
