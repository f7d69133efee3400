"""Requests that a router refuses because there are more than all workers can do in time: a part of them, for a while.

The part is one of what came lately. Those whose priority number is highest go first, as far as they are enough; of
equal ones every so many-th.
"""

import math
from collections import deque

MOST = 0.95  # of the requests: some always come in, whatever is asked for
_RECENT = 256  # requests


class Shedding:
    """Of one model. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._share = 0.0
        self._until = -math.inf
        self._recent: deque[int] = deque(maxlen=_RECENT)  # priorities of what came
        self._owed: dict[int, float] = {}  # by priority: requests that were to be refused and were not

    def ask(self, share: float, until: float) -> None:
        """Refuse this part of the requests, up to MOST, until then. 0: none any more."""
        self._share, self._until = min(share, MOST), until

    def share(self, now: float) -> float:
        """The part that is refused."""
        return self._share if now < self._until else 0.0

    def remaining(self, now: float) -> float:
        """Seconds until all are let in again, unless somebody asks anew."""
        return max(0.0, self._until - now)

    def refuses(self, priority: int, now: float) -> bool:
        """Whether a request that comes now is one of them. Each is to be asked about once."""
        self._recent.append(priority)
        if not (share := self.share(now)):
            self._owed.clear()
            return False
        lesser = sum(each > priority for each in self._recent) / len(self._recent)
        alike = self._recent.count(priority) / len(self._recent)
        owed = self._owed.get(priority, 0.0) + min(1.0, max(0.0, (share - lesser) / alike))
        if len(self._owed) > _RECENT:
            self._owed.clear()
        self._owed[priority] = owed % 1.0
        return owed >= 1.0
