"""What the planner sees of one model: what came within some seconds, how it went, and which workers there are.

NaN says that a value was not measured, which is something else than 0: a window without arrivals says that nothing
came, one whose arrivals are NaN that nobody knows. Means of requests are NaN in windows without requests.
"""

import math
from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "aggregated"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")

NAN = math.nan


def measured(value: float | None) -> bool:
    """Whether it is a number that a count, a time or a length can be."""
    return value is not None and math.isfinite(value) and value >= 0


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seconds` up to `at`. Whoever fills it in leaves out what could not be read."""

    at: float  # unix seconds, of its end
    seconds: float
    arrivals: float = NAN  # requests that came: admitted, queued or refused, so that capacity does not cap demand
    queued: float = NAN  # requests that wait in routers at its end
    prompt_tokens: float = NAN  # of a request, in the mean
    cached_tokens: float = NAN  # of them, that nobody had to compute
    output_tokens: float = NAN  # of an answer, in the mean
    ttft: float = NAN  # seconds, at the quantile of the objective
    tpot: float = NAN  # seconds a token after the first, at the quantile of the objective
    attained: float = NAN  # share of the requests that ended which kept to the objectives
    prefill_rate: float = NAN  # tokens a second of a worker while it computes prompts
    token_seconds: float = NAN  # mean seconds between two tokens of an answer
    batch: float = NAN  # sequences that a worker decodes at once, in the mean over the time in which it decodes any

    @property
    def rate(self) -> float:
        """Arrivals a second. NaN: not measured."""
        return self.arrivals / self.seconds if measured(self.arrivals) and self.seconds > 0 else NAN

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens of a request that had to be computed, in the mean. NaN: not measured."""
        cached = self.cached_tokens if measured(self.cached_tokens) else 0.0
        return max(0.0, self.prompt_tokens - cached) if measured(self.prompt_tokens) else NAN


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One that exists, or has been asked for."""

    name: str
    role: Role
    state: Literal["starting", "ready", "draining"] = "ready"
    since: float = 0.0  # unix seconds at which it came into this state
    gpus: int = 1  # its tensor-parallel degree
    fixed: bool = False  # by the operator: neither flipped nor removed
    start_seconds: float = NAN  # that it took until it was ready, without what came before its process; NaN: not told


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers of one model, and what bounds them."""

    workers: tuple[Worker, ...] = ()
    minimum: dict[Role, int] = {}  # 0 where a role is left out
    maximum: dict[Role, int] = {}  # no bound where a role is left out
    gpus: int = 8  # budget of the model: of all its workers together
    fixed: tuple[Role, ...] = ()  # roles whose numbers the operator sees to

    def of(self, role: Role, *states: str) -> list[Worker]:
        """Workers of a role in one of these states; in any without `states`."""
        return [each for each in self.workers if each.role == role and (not states or each.state in states)]

    @property
    def used_gpus(self) -> int:
        """GPUs of all workers, those that drain or start too."""
        return sum(worker.gpus for worker in self.workers)
