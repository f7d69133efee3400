"""What a prompt's tokens cost this worker, computed here or fetched from a peer, as measured lately."""

from __future__ import annotations

import time

from engine.engine import StepOutput

_KEPT = 0.9  # weight of what was measured before, at each measurement
_LEAST_TOKENS = 32  # of a step that says something about prompts
_ASSUMED = 1000.0  # tokens per second computed, until something is measured
_LEAST_SECONDS = 0.05  # that a late fetch was waited for: less says nothing of how fast KV comes
_RETRY_SECONDS = 30.0  # a peer that was slow, or the way to it, may have got better


class Rate:
    """Tokens per second: a mean over measurements in which the latest count most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.measured_at = 0.0  # monotonic seconds

    @property
    def per_second(self) -> float | None:
        """None: nothing was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self.measured_at = time.monotonic()


class PrefixCosts:
    """Two rates. Belongs to the event loop."""

    def __init__(self) -> None:
        self._computed = Rate()
        self._fetched = Rate()
        self._was_late = False  # the last fetch that counts

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second that steps with prompts compute; None: not measured yet."""
        return self._computed.per_second

    @property
    def fetch_rate(self) -> float | None:
        """Tokens per second that come from peers, from the order until all were sent; None: not measured lately."""
        is_old = time.monotonic() - self._fetched.measured_at > _RETRY_SECONDS
        return None if is_old else self._fetched.per_second

    def computing_seconds(self, tokens: int) -> float:
        """How long this worker would take to compute so many tokens of a prompt, and so may wait for them at most."""
        return tokens / (self.prefill_rate or _ASSUMED)

    def computed(self, output: StepOutput) -> None:
        """A step has ended."""
        prompt_tokens = sum(entry.num_tokens for entry in output.step.entries if entry.num_tokens > 1)
        if prompt_tokens >= _LEAST_TOKENS and output.seconds > 0:
            self._computed.add(prompt_tokens, output.seconds)

    def fetched(self, tokens: int, seconds: float) -> None:
        """A fetch has brought so many tokens in time."""
        self._was_late = False
        self._fetched.add(tokens, seconds)

    def late(self, seconds: float) -> None:
        """A fetch was given up after so long. The first in a row may be its source's fault, and others are quicker."""
        if seconds < _LEAST_SECONDS:
            return
        if self._was_late:
            self._fetched.add(0, seconds)
        self._was_late = True
