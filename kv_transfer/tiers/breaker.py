"""Leaves a store alone that fails: after `FAULTS` operations in a row for a pause, which doubles while it lasts."""

import random
import time

FAULTS = 3
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


class Breaker:
    """Counts what one store's operations came to. After a pause one operation is let through; the rest waits for it."""

    def __init__(self) -> None:
        self._faults = 0  # in a row
        self._shut_until = 0.0  # monotonic seconds
        self._pause = PAUSE
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the store is out of order: what is asked of it is mostly not tried."""
        return self._faults >= FAULTS

    @property
    def pause(self) -> float:
        """Seconds until an operation will be tried again; 0: one would be now."""
        return max(0.0, self._shut_until - time.monotonic()) if self.is_open else 0.0

    def passes(self) -> bool:
        """Whether to try the next operation. Who does has to tell `succeeded` or `failed`."""
        if not self.is_open:
            return True
        now = time.monotonic()
        if now < self._shut_until:
            return False
        self._shut_until = now + self._pause  # for all others
        self._probing = True
        return True

    def succeeded(self) -> None:
        """An operation did what it should."""
        self._faults, self._pause, self._probing = 0, PAUSE, False

    def failed(self) -> None:
        """An operation failed, and not by what was asked."""
        if self.is_open and not self._probing:
            return  # it was begun before
        self._faults += 1
        self._probing = False
        if self.is_open:
            # Not all processes that lost the same server come back at the same time.
            self._shut_until = time.monotonic() + self._pause * random.uniform(0.75, 1.25)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
