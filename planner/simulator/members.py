"""Workers of a simulated cluster that come, change roles, leave and fail.

A worker is a slot: its number, its row in the routers' tables. An empty slot is a row that is not ready. A worker that
flips or leaves gets nothing more, ends what it has, and is then another or gone; one that flips keeps its cache. What
a failed worker had is placed again, and the worker itself starts anew.
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from planner.simulator.clock import Clock
from planner.simulator.replica import Replica
from planner.simulator.settings import Settings
from planner.simulator.worker import MockWorker
from planner.window import Role, Worker

State = Literal["absent", "starting", "ready", "draining"]


class Members:
    """Who is there. `make(number, role)` makes an empty worker."""

    def __init__(
        self,
        roles: Sequence[Role],
        settings: Settings,
        clock: Clock,
        workers: list[MockWorker],
        replicas: Sequence[Replica],
        make: Callable[[int, Role], MockWorker],
    ) -> None:
        self.failures = 0
        self.flips: list[float] = []  # seconds that each took
        self._settings, self._clock = settings, clock
        self._workers, self._replicas, self._make = workers, replicas, make
        self._roles: list[Role] = list(roles)
        self._states: list[State] = ["ready" if at < settings.workers else "absent" for at in range(len(roles))]
        self._since = [0.0] * len(roles)
        self._next_role: list[Role | None] = [None] * len(roles)  # of those that drain; None: they leave
        self._has: list[set[int]] = [set() for _ in roles]  # requests that need the worker
        self._turns = [0] * len(roles)  # what was due for an earlier worker of the slot is due no more
        self._gpu_seconds, self._counted_at, self._counts = 0.0, 0.0, True
        self._rng = random.Random(settings.seed + 1)
        for number, state in enumerate(self._states):
            if state == "absent":
                self._tell(number)

    @property
    def gpu_seconds(self) -> float:
        """That GPUs of workers were there, from when these were asked for until they were gone, or all was over."""
        if not self._counts:
            return self._gpu_seconds
        there = sum(worker.gpus for worker in self.there())
        return self._gpu_seconds + there * (self._clock.now - self._counted_at)

    @property
    def serving(self) -> bool:
        """Somebody can answer."""
        return any(
            state == "ready" and role != "prefill" for state, role in zip(self._states, self._roles, strict=True)
        )

    def stop_counting(self) -> None:
        """All is over: whatever is due later, a planner's look or a worker's start, costs nothing."""
        self._gpu_seconds, self._counts = self.gpu_seconds, False

    def there(self) -> list[Worker]:
        """All but the empty slots."""
        return [
            Worker(
                name=str(number),
                role=self._roles[number],
                state=state,
                since=self._since[number],
                gpus=self._workers[number].offer.gpus,
            )
            for number, state in enumerate(self._states)
            if state != "absent"
        ]

    def takes(self, request: int, *numbers: int | None) -> None:
        """Workers are needed for a request."""
        for number in numbers:
            if number is not None:
                self._has[number].add(request)

    def leaves(self, request: int, *numbers: int | None) -> None:
        """They are needed for it no more."""
        for number in numbers:
            if number is not None:
                self._has[number].discard(request)
                if self._states[number] == "draining" and not self._has[number]:
                    self._drained(number)

    def add(self, role: Role) -> None:
        """One worker more, if there is an empty slot."""
        number = next((at for at, state in enumerate(self._states) if state == "absent"), None)
        if number is not None:
            self._start(number, role)

    def remove(self, number: int) -> None:
        """After what it has is done."""
        self._drain(number, None)

    def flip(self, number: int, role: Role) -> None:
        """After what it has is done."""
        self._drain(number, role)

    def needed_by(self, number: int) -> list[int]:
        """Requests."""
        return sorted(self._has[number])

    def fail(self, number: int) -> None:
        """It is gone at once, and starts anew; nothing needs it any more."""
        self.failures += 1
        self._leave(number)
        self._start(number, self._roles[number])

    def ready(self) -> list[int]:
        """Numbers of those that are."""
        return [number for number, state in enumerate(self._states) if state == "ready"]

    def _start(self, number: int, role: Role) -> None:
        self._roles[number], self._next_role[number] = role, None
        self._enter(number, "starting")
        self._clock.after(self._settings.start_seconds, self._started, number, self._turns[number])

    def _started(self, number: int, turn: int) -> None:
        if self._turns[number] != turn:
            return  # it was removed meanwhile
        self._workers[number] = self._make(number, self._roles[number])
        for replica in self._replicas:
            replica.leave(number)
        self._enter(number, "ready")

    def _drain(self, number: int, role: Role | None) -> None:
        if self._states[number] == "starting" and role is None:
            self._turns[number] += 1
            self._enter(number, "absent")
        elif self._states[number] == "ready":
            self._next_role[number] = role
            self._enter(number, "draining")
            if not self._has[number]:
                self._drained(number)

    def _drained(self, number: int) -> None:
        self._turns[number] += 1
        if self._next_role[number] is None:
            self._leave(number)
        else:
            self._clock.after(self._settings.flip_seconds, self._flipped, number, self._turns[number])

    def _flipped(self, number: int, turn: int) -> None:
        role = self._next_role[number]
        if self._turns[number] == turn and role is not None:
            self._roles[number], self._next_role[number] = role, None
            self._workers[number].turn_to(role)
            self.flips.append(self._clock.now - self._since[number])
            self._enter(number, "ready")

    def _leave(self, number: int) -> None:
        self._turns[number] += 1
        self._workers[number].stop()
        self._workers[number] = self._make(number, self._roles[number])
        for replica in self._replicas:
            replica.leave(number)
        self._enter(number, "absent")

    def _enter(self, number: int, state: State) -> None:
        self._gpu_seconds, self._counted_at = self.gpu_seconds, self._clock.now
        self._states[number], self._since[number] = state, self._clock.now
        self._tell(number)

    def _tell(self, number: int) -> None:
        for replica in self._replicas:
            replica.set_role(number, self._roles[number], ready=self._states[number] == "ready")
