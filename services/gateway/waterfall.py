"""What requests spent their time on, as the gateway sees it and workers tell it: for clients and the console."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

_REQUESTS = 256


class Bar(msgspec.Struct, frozen=True):
    """A stage of one attempt. Stages overlap: a transfer runs while the prompt that it moves is computed."""

    stage: str  # place, queue, prefill, transfer, first_decode, decode
    attempt: int
    start: float  # seconds since the request arrived
    seconds: float
    worker: str  # its name, or "router"


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """One request and the stages of its first choice, in the order in which they began."""

    request: str  # id of the response
    trace_id: str
    arrived: float  # Unix seconds
    seconds: float  # in all, up to now while it runs
    outcome: str  # as in tandem_requests_total
    choices: int
    prompt_tokens: int
    output_tokens: int
    bars: list[Bar]

    def server_timing(self) -> str:
        """The value of a Server-Timing header: durations and starts in milliseconds."""
        entries = [
            f"{bar.stage};dur={1000 * bar.seconds:.3f};start={1000 * bar.start:.3f};attempt={bar.attempt}"
            f';desc="{bar.worker}"'
            for bar in self.bars
        ]
        return ", ".join([*entries, f"total;dur={1000 * self.seconds:.3f}"])


class Waterfalls:
    """Those of the latest 256 requests that ended at this gateway."""

    def __init__(self) -> None:
        self._ring: deque[Waterfall] = deque(maxlen=_REQUESTS)

    def add(self, waterfall: Waterfall) -> None:
        """A request has ended."""
        self._ring.append(waterfall)

    def latest(self) -> list[Waterfall]:
        """The newest first."""
        return list(reversed(self._ring))


def ordered(bars: Iterable[Bar]) -> list[Bar]:
    """By when they began."""
    return sorted(bars, key=lambda bar: bar.start)
