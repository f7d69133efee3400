"""Gateways as queues: what comes to one waits until it has done what came before.

Each is one loop. A request takes it some time, and so does each token of an answer. Tokens come step by step, a share
of every worker's for each gateway. No call of the clock is made for them: what steps brought is added up when somebody
asks, in the order in which they ended.
"""

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from planner.simulator.clock import Clock
from planner.simulator.demand import Trace
from planner.simulator.timing import Timing
from planner.simulator.worker import MockWorker

_BUSY = 2 / 3  # of a gateway's time, at most
_WINDOW = 10.0  # seconds, of which the busiest counts


@dataclass(slots=True, eq=False)
class _Steps:
    """Of one worker, in all of which the same sequences decode."""

    timing: Timing
    began: float
    seconds: float  # of one, if there is only one
    number: int
    sequences: int
    kept: float
    done: int = 0

    def next_ends(self) -> float:
        """When the next one does."""
        if self.number == 1:
            return self.began + self.seconds
        return self.began + self.timing.decodes(self.done + 1, self.sequences, self.kept)


class Streams:
    """What `gateways` have to do. Requests go to them in turn. All times are the clock's."""

    def __init__(self, timing: Timing, gateways: int, clock: Clock) -> None:
        self._timing, self._clock = timing, clock
        self._free_at = [0.0] * gateways
        self._steps: dict[int, _Steps] = {}  # under way, by worker
        self._coming: list[tuple[float, int, _Steps]] = []  # a heap
        self._order = itertools.count()

    def steps(self, worker: MockWorker, began: float, seconds: float, number: int) -> None:
        """A worker has begun so many steps, or those that began then are so many after all."""
        steps = self._steps.get(worker.number)
        if steps is not None and steps.began == began:
            steps.number, steps.seconds = number, seconds
        elif worker.decoding:
            sequences, kept = len(worker.decoding), worker.kept_tokens
            steps = _Steps(worker.offer.timing, began, seconds, number, sequences, kept)
            self._steps[worker.number] = steps
            heapq.heappush(self._coming, (steps.next_ends(), next(self._order), steps))

    def failed(self, worker: int) -> None:
        """It has: of its steps those count that have ended."""
        self._take(0, 0.0)
        if (steps := self._steps.pop(worker, None)) is not None:
            steps.number = steps.done

    def service(self, tokens: int) -> float:
        """Seconds of a gateway for a request with a prompt of so many tokens."""
        return self._timing.gateway_request + self._timing.request_token * tokens

    def read(self, number: int, tokens: int) -> float:
        """Request `number` comes. When its gateway has read it, of so many tokens."""
        return self._take(number, self.service(tokens))

    def free_at(self, number: int) -> float:
        """When the request's gateway has done all that came."""
        return self._take(number, 0.0)

    def token(self, number: int) -> float:
        """A token of the request's answer comes that somebody waits for. When the client has it, but for a hop."""
        return self._take(number, self._timing.gateway_token)

    def _take(self, number: int, seconds: float) -> float:
        now, at = self._clock.now, number % len(self._free_at)
        share = self._timing.gateway_token / len(self._free_at)
        while self._coming and self._coming[0][0] <= now:
            ended, order, steps = heapq.heappop(self._coming)
            if steps.done < steps.number:
                self._free_at = [max(free, ended) + share * steps.sequences for free in self._free_at]
                steps.done += 1
            if steps.done < steps.number:
                heapq.heappush(self._coming, (steps.next_ends(), order, steps))
        self._free_at[at] = max(self._free_at[at], now) + seconds
        return self._free_at[at]


def enough_gateways(trace: Trace, rate: float, timing: Timing) -> int:
    """Of which none has work for more than two thirds of the time when most requests come."""
    prompts = sum(demand.prompt_tokens for demand in trace.demands)
    outputs = sum(demand.output_tokens for demand in trace.demands)
    seconds = timing.gateway_request * len(trace.demands) + timing.request_token * prompts
    each = (seconds + timing.gateway_token * outputs) / len(trace.demands)
    starts = trace.starts(rate)
    window = min(_WINDOW, max(1.0, float(starts[-1])))
    come = np.unique(starts // window, return_counts=True)[1].max() / window
    return max(1, math.ceil(float(come) * each / _BUSY))
