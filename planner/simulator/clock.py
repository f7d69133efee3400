"""The clock of a simulation: calls in the order of their times."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """`now` in seconds jumps from call to call; calls of one time run in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # calls made so far
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls at a time, now if it is over."""
        heapq.heappush(self._calls, (max(when, self.now), next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def run(self) -> None:
        """Until no call is left."""
        calls = self._calls
        while calls:
            self.now, _, call, arguments = heapq.heappop(calls)
            self.events += 1
            call(*arguments)
