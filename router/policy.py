"""Where a request goes: a pure function of a snapshot of the cluster and the request."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from router.cost import NOWHERE, Elsewhere, Prediction, alike, decode_costs, predict, prefill_costs
from router.policies import POLICIES, Draw
from router.snapshot import Ask, Snapshot


class Way(Enum):
    """Who computes the prompt, and why."""

    REMOTE = "remote prefill"
    ASKED = "local prefill asked for"
    AGGREGATED = "aggregated worker"
    SHORT = "short uncached prompt"
    SOONER = "local prefill far sooner"
    ALONE = "no prefill worker"


@dataclass(frozen=True, slots=True)
class Choice:
    """How the worker for one role was chosen: the best candidates, first the one that won."""

    role: str  # column of router.fleet.WORKER: decodes or prefills
    candidates: int  # in all
    equals: int  # among which chance decided
    rows: NDArray[np.intp]  # of the best, at most _TOLD, in the snapshot
    costs: NDArray[np.float64]
    workers: Snapshot  # these alone, as they were

    @property
    def winner(self) -> int:
        """Its row."""
        return int(self.rows[0])


@dataclass(frozen=True, slots=True)
class Decision:
    """Workers of a request, as rows of the snapshot, and why."""

    decode: int
    prefill: int | None
    way: Way
    reason: str  # in words
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    prediction: Prediction = field(default_factory=Prediction)

    @property
    def ttft(self) -> float:
        """Predicted seconds to the first token."""
        return self.prediction.ttft

    @property
    def tpot(self) -> float:
        """Predicted seconds for each token after it."""
        return self.prediction.tpot

    @property
    def computing(self) -> int:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


_TOLD = 8  # candidates that a decision remembers


class NoWorker(Exception):
    """Nobody can decode."""


def place(ask: Ask, snapshot: Snapshot, *, policy: str, local_prefill_tokens: int, draw: Draw) -> Decision:
    """The decode worker, and the prefill worker unless the decode worker does it itself. Raises NoWorker.

    The decode worker computes the prompt itself when it is an aggregated worker, when there is no prefill worker, when
    that was asked for, or when no more than `local_prefill_tokens` are missing there. By the policy `prefix`, unless
    that limit is 0, it does so as well when that is predicted to be far better.
    """
    prefilling = None if ask.local_prefill_only else _choose("prefills", ask, snapshot, policy, draw)
    elsewhere = _elsewhere(ask, prefilling, draw) if policy == "prefix" else NOWHERE
    decoding = _choose("decodes", ask, snapshot, policy, draw._replace(elsewhere=elsewhere))
    if decoding is None:
        raise NoWorker("no decode or aggregated worker is ready")
    decode = decoding.winner
    # What is still on its way there would be computed once more.
    uncached = ask.uncached(snapshot.cached_tokens[decode])
    drawn = f", one of {decoding.equals} that are as good" if decoding.equals > 1 else ""
    chosen = f"{policy}: {snapshot.cached_blocks[decode]} blocks cached on the decode worker{drawn}"
    if ask.local_prefill_only:
        return _decided(ask, Way.ASKED, f"{chosen}; local prefill asked for", decoding)
    if snapshot.table["aggregated"][decode]:
        return _decided(ask, Way.AGGREGATED, f"{chosen}, an aggregated one", decoding)
    if uncached <= local_prefill_tokens:
        reason = f"{chosen}; only {uncached} prompt tokens are left to compute"
        return _decided(ask, Way.SHORT, reason, decoding)
    apart = snapshot.apart.get(decode, frozenset())
    if prefilling is not None and prefilling.winner in apart:
        prefilling = _choose("prefills", ask, snapshot, policy, draw, apart)
        elsewhere = _elsewhere(ask, prefilling, draw)
    if prefilling is None:
        reason = f"{chosen}; no prefill worker is ready, or all that are fail"
        return _decided(ask, Way.ALONE, reason, decoding)
    if (
        policy == "prefix"
        and local_prefill_tokens
        and decode_costs(ask, decoding.workers, draw.objectives, elsewhere).local[0]
    ):
        reason = f"{chosen}; the best prefill worker would need {elsewhere.ttft:.3g} s"
        return _decided(ask, Way.SOONER, reason, decoding)
    drawn = f", one of {prefilling.equals}" if prefilling.equals > 1 else ""
    reason = f"{chosen}; {snapshot.cached_blocks[prefilling.winner]} on the prefill worker{drawn}"
    return _decided(ask, Way.REMOTE, reason, decoding, prefilling)


def _elsewhere(ask: Ask, prefilling: Choice | None, draw: Draw) -> Elsewhere:
    """What the chosen prefill worker offers to a decode worker."""
    if prefilling is None:
        return NOWHERE
    costs = prefill_costs(ask, prefilling.workers, draw.objectives)
    return Elsewhere(float(costs.ttft[0]), float(costs.cost[0]))


def _decided(ask: Ask, way: Way, reason: str, decoding: Choice, prefilling: Choice | None = None) -> Decision:
    """With what is predicted of it."""
    prediction = predict(ask, decoding.workers, None if prefilling is None else prefilling.workers)
    prefill = None if prefilling is None else prefilling.winner
    choices = (decoding,) if prefilling is None else (decoding, prefilling)
    return Decision(decoding.winner, prefill, way, reason, choices, prediction)


def _choose(
    role: str, ask: Ask, snapshot: Snapshot, policy: str, draw: Draw, apart: frozenset[int] = frozenset()
) -> Choice | None:
    """None: no worker of this role is ready, or none but those `apart`, or none of those that prefill works.

    Where all that decode are shut out, one of them may still be better than nobody.
    """
    table = snapshot.table
    able = table["ready"] & table[role]
    if apart:
        able[list(apart)] = False
    (rows,) = (able & ~table["shut"]).nonzero()
    if not len(rows) and role == "decodes":
        (rows,) = able.nonzero()
    if not len(rows):
        return None
    workers = snapshot if len(rows) == len(table) else snapshot.take(rows)
    costs = POLICIES[policy](ask, workers, draw)
    equals = alike(ask, workers, costs, draw.tolerance) if policy == "prefix" else np.flatnonzero(costs == costs.min())
    winner = int(equals[draw.rng.integers(len(equals))])
    least = np.argpartition(costs, _TOLD)[:_TOLD] if len(rows) > _TOLD else np.arange(len(rows))
    others = [other for other in least[np.argsort(costs[least], kind="stable")].tolist() if other != winner]
    told = np.array([winner, *others][:_TOLD])
    return Choice(role, len(rows), len(equals), rows[told], costs[told], workers.take(told))
