"""Who may wait: a request whose first token would miss its deadline, or the time that is the aim, is refused at once.

How long the queue takes is predicted from the tokens before the request and the rate at which tokens have left the
queue lately. In the beginning that is the rate at which the workers compute prompts; it counts for a second, and for
less the longer somebody has waited.
"""

import math
from enum import Enum
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from router.queue import FairQueue, W
from router.saturation import computing, prefill_rates
from router.snapshot import Ask

_MEMORY = 20.0  # seconds after which what left the queue counts for a third
_TOKENS = 8192  # of a request in a queue that is full, on the average


class Shed(Enum):
    """Why a request is refused."""

    FULL = "queue full"
    LATE = "deadline"
    SLOW = "slo"
    EXCESS = "planner"


class Refused(Exception):
    """Not now. `retry_after`: seconds until the same request would be let in, as predicted."""

    def __init__(self, why: Shed, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.why = why
        self.retry_after = retry_after


class Admission(Generic[W]):
    """The queue with its door: at most `max_requests` wait, and only those that will be served in time.

    `slo_ttft`: seconds to the first token that are the aim; inf: none.
    """

    def __init__(self, max_requests: int, slo_ttft: float) -> None:
        self._slo_ttft = slo_ttft
        self.queue: FairQueue[W] = FairQueue(max_requests, max_requests * _TOKENS)
        self._seconds = 0.0  # that somebody waited lately
        self._left = 0.0  # tokens that left the queue meanwhile
        self._counted_at = -math.inf

    def rate(self, table: NDArray[np.void], now: float) -> float:
        """Tokens per second that leave the queue."""
        self._count(now)
        prior = float(prefill_rates(table)[computing(table)].sum())
        weight = 1.0 / (1.0 + self._seconds)  # seconds for which the prior counts
        return max(1.0, (weight * prior + self._left) / (weight + self._seconds))

    def enter(
        self, waiting: W, ask: Ask, table: NDArray[np.void], queued_tokens: NDArray[np.float64], now: float
    ) -> None:
        """Takes a request into the queue. `table`, `queued_tokens`: the fleet's, `[n]`. Raises Refused."""
        self._count(now)
        if waiting.resumes:  # it was let in before
            self.queue.add(waiting)
            return
        rate = self.rate(table, now)
        ahead = self.queue.ahead(waiting, now, rate)
        if not self.queue.fits(waiting.tokens):
            raise Refused(Shed.FULL, f"{len(self.queue)} requests wait already", max(ahead, waiting.tokens) / rate)
        able = computing(table)
        if not able.any():  # all have left since the others came: it is told so when its turn comes, which is at once
            self.queue.add(waiting)
            return
        first_token = ((queued_tokens[able] + ask.prompt_tokens) / np.maximum(1.0, prefill_rates(table)[able])).min()
        ttft = ahead / rate + float(first_token)
        remaining = waiting.deadline - now
        if ttft > min(remaining, self._slo_ttft):
            why, allowed = (Shed.LATE, remaining) if ttft > remaining else (Shed.SLOW, self._slo_ttft)
            message = f"its first token would come in {ttft:.1f} s, and has {allowed:.1f} s ({why.value})"
            raise Refused(why, message, ttft - min(remaining, self._slo_ttft))
        self.queue.add(waiting)

    def take(self, waiting: W, now: float) -> None:
        """The first one goes."""
        self._count(now)
        self._left += waiting.tokens
        self.queue.take(waiting)

    def _count(self, now: float) -> None:
        """Time passes, which counts as long as somebody waits."""
        passed = max(0.0, now - self._counted_at)
        fading = math.exp(-passed / _MEMORY)
        self._left *= fading
        self._seconds *= fading
        if len(self.queue):
            self._seconds += passed
        self._counted_at = now
