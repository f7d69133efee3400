"""A circuit breaker: nothing goes where the latest attempts have failed, until one of them, as a probe, succeeds.

It opens when `FAULTS` came within `WINDOW` seconds and were at least half of what ended in that time. After a pause it
is half open: one request at a time may go there. A probe that succeeds closes it, one that fails opens it for longer.
"""

from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

FAULTS = 5
WINDOW = 30.0  # seconds
PAUSE, LONGEST_PAUSE = 3.0, 60.0  # seconds; doubled each time that it opens again
PROBE_SECONDS = 10.0  # a probe of which so long nothing was heard keeps nobody else out


class BreakerState(Enum):
    """Who may pass."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "half open"  # one at a time


class _Fault(NamedTuple):
    at: float
    successes: int  # before it
    witness: Hashable


class Breaker:
    """Times are monotonic seconds. `witnesses`: the faults must come from so many sides to be laid to this one."""

    def __init__(self, witnesses: int = 1) -> None:
        self.half_open_at = 0.0  # when the pause is over, where it is not closed
        self._witnesses = witnesses
        self._faults: deque[_Fault] = deque(maxlen=FAULTS)
        self._successes = 0
        self._is_open = False
        self._openings = 0  # in a row
        self._closed_at = float("-inf")
        self._probe: Hashable = None
        self._probe_until = 0.0

    def state(self, now: float) -> BreakerState:
        """What it is now."""
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.half_open_at else BreakerState.HALF_OPEN

    def passes(self, now: float) -> bool:
        """Whether the next request may go there."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                return self._probe is None or now >= self._probe_until

    def is_idle(self, now: float) -> bool:
        """Whether it may be forgotten: closed, and its latest fault or closing is long ago."""
        latest = max(self._closed_at, self._faults[-1].at if self._faults else self._closed_at)
        return not self._is_open and now - latest >= LONGEST_PAUSE

    def is_waiting(self, now: float) -> bool:
        """Whether it is half open, and for long nothing was sent there."""
        return self._is_open and self._probe is None and now - self.half_open_at >= PROBE_SECONDS

    def sent(self, key: Hashable, now: float) -> None:
        """An attempt was sent there; where it is half open that is the probe."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe, self._probe_until = key, now + PROBE_SECONDS

    def succeeded(self, key: Hashable, now: float) -> None:
        """An attempt ended well. Of those that were sent before it opened, none says that it would now."""
        self._successes += 1
        if self._is_open and key == self._probe:
            self._close(now)

    def failed(self, key: Hashable, now: float, witness: Hashable = None) -> None:
        """An attempt failed by a fault of this side."""
        if self._is_open:
            if key == self._probe:
                self._open(now)
            return
        self._faults.append(_Fault(now, self._successes, witness))
        first = self._faults[0]
        many = len(self._faults) == FAULTS and now - first.at <= WINDOW and self._successes - first.successes <= FAULTS
        if many and len({fault.witness for fault in self._faults}) >= self._witnesses:
            self._open(now)

    def ended(self, key: Hashable) -> None:
        """An attempt ended in a way that says nothing: another may be the probe."""
        if key == self._probe:
            self._probe = None

    def checked(self, alive: bool, now: float) -> None:
        """Half open and without requests, it was asked whether it is alive. If so it closes, until the next fault."""
        if not alive:
            self._open(now)
            return
        self._close(now)
        self._faults.extend([_Fault(now, self._successes, number) for number in range(FAULTS - 1)])

    def _open(self, now: float) -> None:
        again = self._is_open or now - self._closed_at < LONGEST_PAUSE
        self._openings = min(self._openings + 1, 16) if again else 1
        self._is_open, self._probe = True, None
        self.half_open_at = now + min(PAUSE * 2.0 ** (self._openings - 1), LONGEST_PAUSE)
        self._faults.clear()

    def _close(self, now: float) -> None:
        self._is_open, self._probe, self._closed_at = False, None, now
        self._faults.clear()
