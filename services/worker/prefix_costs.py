"""What a prompt's tokens cost this worker, computed here or fetched from elsewhere, as measured lately."""

from __future__ import annotations

import math
import time

from engine.engine import StepOutput
from engine.request import HOST, TIERS

_KEPT = 0.9  # weight of what was measured before, at each measurement
_LEAST_TOKENS = 32  # of a step that says something about prompts
_ASSUMED = 1000.0  # tokens per second computed, until something is measured
_LEAST_SECONDS = 0.05  # that a late fetch was waited for: less says nothing of how fast KV comes
_NOISE_SECONDS = 0.02  # that processes wait for a processor on a busy machine, whichever way the KV comes
_STEPS_WAITED = 2  # by a fetch that begins when its turn comes
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


class Fetched:
    """How fast KV comes from one kind of source: other workers, or one tier of the KV service."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._was_late = False  # the last fetch that counts

    @property
    def per_second(self) -> float | None:
        """Tokens per second, from the order until all were sent; None: not measured lately."""
        is_old = time.monotonic() - self._rate.measured_at > _RETRY_SECONDS
        return None if is_old else self._rate.per_second

    def came(self, tokens: int, seconds: float) -> None:
        """A fetch has brought so many tokens in time."""
        self._was_late = False
        self._rate.add(tokens, seconds)

    def late(self, seconds: float) -> None:
        """A fetch was given up after so long. The first in a row may be its source's fault, and others are quicker.

        After the second, what was quick before says nothing any more.
        """
        if seconds < _LEAST_SECONDS:
            return
        if self._was_late:
            self._rate = Rate()
            self._rate.add(0, seconds)
        self._was_late = True


class PrefixCosts:
    """Rates. Belongs to the event loop."""

    def __init__(self) -> None:
        self._computed = Rate()
        self._fetched = {tier: Fetched() for tier in ("", *TIERS)}
        self._steps = Rate()  # of any kind; a "token" is one of them

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second that steps with prompts compute; None: not measured yet."""
        return self._computed.per_second

    def fetched(self, tier: str) -> Fetched:
        """Of fetches from the KV service of what is no further away than in `tier`; empty: from other workers."""
        return self._fetched[tier]

    def another_service(self) -> None:
        """A KV service has come: what was measured of the one before, such as that it hung, says nothing of it."""
        self._fetched.update({tier: Fetched() for tier in TIERS})

    def restoring_pays(self, tokens: int) -> bool:
        """Whether so many tokens, whose turn it is, come sooner from the KV service's host memory than computed.

        To ask for them and to take them in each waits for a step. What was not measured is believed to be quick.
        """
        rate, steps = self.fetched(HOST).per_second, self._steps.per_second
        waits = _STEPS_WAITED / steps if steps else 0.0
        fetching = 0.0 if rate is None else tokens / rate if rate else math.inf
        return waits + fetching < tokens / (self.prefill_rate or _ASSUMED)

    def computing_seconds(self, tokens: int) -> float:
        """How long this worker would take to compute so many tokens of a prompt, and so may wait for them at most.

        They would wait for the step under way, too: of a few tokens that is most of it.
        """
        steps = self._steps.per_second
        return tokens / (self.prefill_rate or _ASSUMED) + (1 / steps if steps else 0.0) + _NOISE_SECONDS

    def computed(self, output: StepOutput) -> None:
        """A step has ended."""
        if output.step.entries and output.seconds > 0:
            self._steps.add(1, output.seconds)
        prompt_tokens = sum(entry.num_tokens for entry in output.step.entries if entry.num_tokens > 1)
        if prompt_tokens >= _LEAST_TOKENS and output.seconds > 0:
            self._computed.add(prompt_tokens, output.seconds)
