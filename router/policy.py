"""Where a request goes: pure functions of a snapshot of the cluster and the request."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from router.reservations import Outstanding


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker, as it is at this moment for this request."""

    worker: str  # incarnation
    role: str
    outstanding: Outstanding
    block_size: int  # tokens
    cached_blocks: int  # leading blocks of this request that it holds
    expected_blocks: int  # that it holds or will hold soon, by the requests under way there; not less than the former
    full: bool = False  # requests wait there for KV blocks
    layout: str = ""  # of its blocks
    prefill_rate: float | None = None  # tokens per second that it computes of prompts; None: not measured
    fetch_rate: float | None = None  # that it fetches from others; 0: it cannot

    @property
    def cached_tokens(self) -> int:
        """Leading tokens of this request that it holds."""
        return self.cached_blocks * self.block_size

    @property
    def expected_tokens(self) -> int:
        """Leading tokens of this request that it holds or will hold soon."""
        return self.expected_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of the request."""

    prompt_tokens: int
    max_tokens: int
    local_prefill_only: bool = False

    def uncached(self, cached_tokens: int) -> int:
        """Prompt tokens left to compute where that many leading ones are cached; the last one always."""
        return max(1, self.prompt_tokens - cached_tokens)


class Way(Enum):
    """Who computes the prompt, and why."""

    REMOTE = "remote prefill"
    ASKED = "local prefill asked for"
    AGGREGATED = "aggregated worker"
    SHORT = "short uncached prompt"
    ALONE = "no prefill worker"


@dataclass(frozen=True, slots=True)
class Decision:
    """Workers of a request, and why."""

    decode: Candidate
    prefill: Candidate | None
    way: Way
    reason: str  # in words

    @property
    def computing(self) -> Candidate:
        """Who computes the prompt."""
        return self.prefill or self.decode


class NoWorker(Exception):
    """Nobody can decode."""


_OWN = 1.25
_KEPT = 0.125

# Cost of giving the request to a candidate; the least wins.
Cost = Callable[[Candidate, Ask], float]


def _least_outstanding(candidate: Candidate, ask: Ask) -> float:
    return candidate.outstanding.prefill_tokens + candidate.outstanding.decode_tokens


def _prefix(candidate: Candidate, ask: Ask) -> float:
    """Tokens to compute before this request, and of this request: what is cached need not be computed.

    To wait until another request has computed a prefix takes as long as to compute it here; but a token computed
    once more also delays whatever comes behind, hence _OWN. A token kept for a running answer slows this request far
    less than one that is prefilled before it, hence _KEPT.
    """
    load = candidate.outstanding
    return load.prefill_tokens + _KEPT * load.decode_tokens + _OWN * ask.uncached(candidate.expected_tokens)


def _random(candidate: Candidate, ask: Ask) -> float:
    return 0.0


ROUND_ROBIN = "round_robin"
POLICIES: dict[str, Cost] = {
    "prefix": _prefix,
    "least_outstanding": _least_outstanding,
    "random": _random,
}


def place(
    ask: Ask,
    candidates: Sequence[Candidate],
    *,
    policy: str,
    local_prefill_tokens: int,
    turn: int,
    rng: random.Random,
) -> Decision:
    """The decode worker, and the prefill worker unless the decode worker does it itself. Raises NoWorker.

    Ties are broken by `rng`; `turn` counts decisions, for round robin. Nothing goes where requests wait for KV blocks
    while there are others. The decode worker computes the prompt itself when it is an aggregated worker, when
    there is no prefill worker, when that was asked for, or when no more than `local_prefill_tokens` are missing there.
    """

    def best(role: tuple[str, ...]) -> Candidate | None:
        able = sorted((c for c in candidates if c.role in role), key=lambda c: c.worker)
        able = [c for c in able if not c.full] or able
        if not able or policy == ROUND_ROBIN:
            return able[turn % len(able)] if able else None
        costs = [POLICIES[policy](candidate, ask) for candidate in able]
        least = min(costs)
        return rng.choice([candidate for candidate, cost in zip(able, costs, strict=True) if cost == least])

    decode = best(("decode", "aggregated"))
    if decode is None:
        raise NoWorker("no decode or aggregated worker is ready")
    uncached = ask.uncached(decode.cached_tokens)  # what is still on its way there would be computed once more
    chosen = f"{policy}: {decode.cached_blocks} blocks cached on the decode worker"
    if ask.local_prefill_only:
        return Decision(decode, None, Way.ASKED, f"{chosen}; local prefill asked for")
    if decode.role == "aggregated":
        return Decision(decode, None, Way.AGGREGATED, f"{chosen}, an aggregated one")
    if uncached <= local_prefill_tokens:
        return Decision(decode, None, Way.SHORT, f"{chosen}; only {uncached} prompt tokens are left to compute")
    prefill = best(("prefill",))
    if prefill is None:
        return Decision(decode, None, Way.ALONE, f"{chosen}; no prefill worker is ready")
    return Decision(decode, prefill, Way.REMOTE, f"{chosen}, {prefill.cached_blocks} on the prefill worker")
