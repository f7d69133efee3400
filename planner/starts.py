"""How long workers take to start, learned from those that did: two bounds from below, of which the larger counts.

What a worker tells of itself leaves out what came before its process, such as a node or an image. What is seen from
outside, from the asking to the last look before it was there, leaves out nothing but a look's interval.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from planner.window import NAN, Role, Worker, measured

_LATEST = 5  # starts that are remembered


class Starts:
    """Of one model's workers. All times in seconds."""

    def __init__(self) -> None:
        self._told = 0.0
        self._took: deque[float] = deque(maxlen=_LATEST)
        self._starting: dict[str, tuple[Role, float]] = {}  # role, and how long it had been starting at the last look
        self._there: set[str] | None = None  # None: nobody has looked yet

    @property
    def seen(self) -> float:
        """Mean of the latest that were seen from outside. NaN: none was."""
        return fmean(self._took) if self._took else NAN

    @property
    def least(self) -> float:
        """That a worker takes, at the least. 0: nothing is known."""
        return max(self._told, fmean(self._took) if self._took else 0.0)

    def restore(self, seen: float) -> None:
        """Of a planner before this one."""
        if measured(seen):
            self._took.append(seen)

    def see(self, workers: Sequence[Worker], now: float) -> None:
        """One look. A worker that has come is one of those that started; where names differ, any of its role."""
        self._told = max((each.start_seconds for each in workers if measured(each.start_seconds)), default=self._told)
        starting = {each.name: (each.role, now - each.since) for each in workers if each.state == "starting"}
        there = {each.name for each in workers} - starting.keys()
        came = [each for each in workers if each.name in there - (self._there if self._there is not None else there)]
        gone = {name: each for name, each in self._starting.items() if name not in starting}
        for worker in came:
            like = (name for name, (role, _) in gone.items() if role == worker.role)
            if (name := worker.name if worker.name in gone else next(like, None)) is not None:
                self._took.append(max(0.0, gone.pop(name)[1]))
        self._starting, self._there = starting, there
