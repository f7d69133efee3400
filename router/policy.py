"""Where a request goes: a pure function of a snapshot of the cluster and the request."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from router.policies import POLICIES, Draw
from router.snapshot import Ask, Snapshot


class Way(Enum):
    """Who computes the prompt, and why."""

    REMOTE = "remote prefill"
    ASKED = "local prefill asked for"
    AGGREGATED = "aggregated worker"
    SHORT = "short uncached prompt"
    ALONE = "no prefill worker"


@dataclass(frozen=True, slots=True)
class Decision:
    """Workers of a request, as rows of the snapshot, and why."""

    decode: int
    prefill: int | None
    way: Way
    reason: str  # in words

    @property
    def computing(self) -> int:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


class NoWorker(Exception):
    """Nobody can decode."""


def place(ask: Ask, snapshot: Snapshot, *, policy: str, local_prefill_tokens: int, draw: Draw) -> Decision:
    """The decode worker, and the prefill worker unless the decode worker does it itself. Raises NoWorker.

    The decode worker computes the prompt itself when it is an aggregated worker, when there is no prefill worker, when
    that was asked for, or when no more than `local_prefill_tokens` are missing there.
    """

    def best(role: str) -> int | None:
        rows = np.flatnonzero(snapshot.table["ready"] & snapshot.table[role])
        if not len(rows):
            return None
        costs = POLICIES[policy](ask, snapshot.take(rows), draw)
        equals = np.flatnonzero(costs == costs.min())
        return int(rows[equals[draw.rng.integers(len(equals))]])

    decode = best("decodes")
    if decode is None:
        raise NoWorker("no decode or aggregated worker is ready")
    # What is still on its way there would be computed once more.
    uncached = ask.uncached(snapshot.cached_tokens[decode])
    chosen = f"{policy}: {snapshot.cached_blocks[decode]} blocks cached on the decode worker"
    if ask.local_prefill_only:
        return Decision(decode, None, Way.ASKED, f"{chosen}; local prefill asked for")
    if snapshot.table["aggregated"][decode]:
        return Decision(decode, None, Way.AGGREGATED, f"{chosen}, an aggregated one")
    if uncached <= local_prefill_tokens:
        return Decision(decode, None, Way.SHORT, f"{chosen}; only {uncached} prompt tokens are left to compute")
    prefill = best("prefills")
    if prefill is None:
        return Decision(decode, None, Way.ALONE, f"{chosen}; no prefill worker is ready")
    return Decision(decode, prefill, Way.REMOTE, f"{chosen}, {snapshot.cached_blocks[prefill]} on the prefill worker")
