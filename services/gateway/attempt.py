"""One attempt of a sequence, as the router hears of it when it has ended."""

from __future__ import annotations

import time

from engine.request import Stage, TokenOutput
from services.gateway.waterfall import Bar
from services.rpc import router_pb2

_ENOUGH_SECONDS = 5.0  # in which a worker that is well gives a token: who allows less has himself to blame


class Attempt:
    """The number, the workers, the times and the end of an attempt."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: router_pb2.Outcome = router_pb2.UNTOLD
        self._prefill = ""
        self._decode = ""
        self._prefill_failed = False
        self._cached_tokens: int | None = None  # not known before the first output
        self._begun_at = time.monotonic()
        self._placed_at = self._first_at = self._second_at = self._last_at = 0.0  # monotonic seconds
        self._placement = router_pb2.Placement()
        self._stages: list[Stage] = []
        self._output_tokens = 0

    @property
    def answers(self) -> bool:
        """Whether a token has come."""
        return self._output_tokens > 0

    def placed(self, placement: router_pb2.Placement) -> None:
        """Its workers are chosen."""
        self._placed_at = time.monotonic()
        self._decode, self._prefill = placement.decode.incarnation, placement.prefill.incarnation
        self._placement = placement

    def had_most_of(self, begun: float, deadline: float) -> bool:
        """Whether its workers had at least half of the time between, both in monotonic seconds, and enough for any."""
        had = deadline - self._placed_at
        return self._placed_at > 0 and had >= max(_ENOUGH_SECONDS, (deadline - begun) / 2)

    def reused(self, cached_tokens: int) -> None:
        """The first output of the sequence came in this attempt, and says so much of the prompt's reuse."""
        self._cached_tokens = max(self._cached_tokens or 0, cached_tokens)

    def received(self, output: TokenOutput, new_tokens: int) -> None:
        """An output of this attempt came, with so many tokens that were not known yet."""
        self._prefill_failed |= output.prefill_failed
        self._stages = output.stages or self._stages
        if new_tokens:
            self._last_at = time.monotonic()
            if self._first_at:
                self._second_at = self._second_at or self._last_at
            self._first_at = self._first_at or self._last_at
            self._output_tokens += new_tokens

    def bars(self, arrival: float) -> list[Bar]:
        """What it spent its time on, seconds after `arrival` (monotonic)."""

        def bar(stage: str, begin: float, end: float, worker: str) -> Bar:
            return Bar(stage, self.number, begin - arrival, end - begin, worker)

        if not self._placed_at:
            return [bar("place", self._begun_at, time.monotonic(), "router")]
        decode, prefill, held = self._placement.decode.name, self._placement.prefill.name, self._placement.held_seconds
        bars = [bar("place", self._begun_at, self._placed_at, "router")]
        if held:
            bars.append(bar("queue", self._begun_at, self._begun_at + held, "router"))
        joined = self._first_at  # the running batch
        for stage in self._stages:
            begin = self._placed_at + stage.start
            joined = max(joined, begin + stage.seconds)
            bars.append(bar(stage.name, begin, begin + stage.seconds, prefill if stage.elsewhere else decode))
        if self._second_at:
            bars.append(bar("first_decode", min(joined, self._second_at), self._second_at, decode))
        if self._first_at:
            bars.append(bar("decode", self._first_at, self._last_at, decode))
        return bars

    def report(self, request_id: str) -> router_pb2.ReleaseRequest:
        """What is told of it."""
        return router_pb2.ReleaseRequest(
            request_id=request_id,
            attempt=self.number,
            cached_tokens=self._cached_tokens,
            outcome=self.outcome,
            decode=self._decode,
            prefill=self._prefill,
            prefill_failed=self._prefill_failed,
            ttft_seconds=self._first_at - self._placed_at if self.answers else None,
            output_tokens=self._output_tokens,
            decode_seconds=self._last_at - self._first_at,
        )
