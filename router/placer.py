"""The router's view of its cluster, and decisions upon it: the table, caches, expectations and bookings as one."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import CacheCleared, KvEvent
from router.cost import Objectives
from router.expected import ExpectedBlocks
from router.fetch import fetchable_tokens, source_for
from router.fit import Fit, Measured
from router.fleet import Fleet
from router.health import Health
from router.index import BlockIndex
from router.policies import Draw, Overlap
from router.policy import Decision, place
from router.regret import Regret
from router.reservations import Reservation, Reservations
from router.saturation import has_room, kept_tokens
from router.snapshot import Ask, Snapshot, mean_rates

_HISTORY = 120.0  # seconds for which the policy `history` remembers what it gave to whom, at least
_HISTORY_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision that is booked, what it looked at, and from where a prefix is to be fetched."""

    decision: Decision
    snapshot: Snapshot
    source: int | None  # row, which of a KV service says how far it is to look


class Placer:
    """Everything is known by rows of `fleet`. Not thread-safe."""

    def __init__(
        self,
        *,
        policy: str,
        local_prefill_tokens: int,
        fetch_tokens: int,
        overlap_weight: float = 1.0,
        overlap_temperature: float = 0.0,
        prefix_tolerance: float = 0.05,
        objectives: Objectives = Objectives(),  # noqa: B008
        seed: int | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.index = BlockIndex()
        self.reservations = Reservations(self.fleet)
        self.health = Health(self.fleet)
        self._fit = Fit(self.fleet)
        self._regret = Regret(self.fleet, self.index)
        self._expected = ExpectedBlocks(_HISTORY, _HISTORY_BLOCKS) if policy == "history" else ExpectedBlocks()
        self._policy = policy
        self._local_prefill_tokens = local_prefill_tokens
        self._fetch_tokens = fetch_tokens
        self._overlap = Overlap(overlap_weight, overlap_temperature)
        self._tolerance = prefix_tolerance
        self._objectives = objectives
        self._rng = np.random.default_rng(seed)
        self._decisions = 0

    def leave(self, worker: str) -> None:
        """Forgets a worker: its blocks, what was expected of it, its load."""
        rows = self.fleet.rows(worker)
        for row in rows:
            self.index.remove(row)
            self._expected.remove(row)
            self.reservations.forget(row)
            self.health.forget(row)
            self._fit.forget(row)
            self._regret.forget(row)
        if rows:
            self.fleet.leave(worker)

    def changed_role(self, row: int) -> None:
        """A worker does other work from now on: how fast and how well it did the old says nothing of that."""
        self.health.forget(row)
        self._fit.forget(row)

    def told(self, row: int, events: Sequence[KvEvent]) -> None:
        """What a worker says of its cache. One that was cleared is not expected to hold what was on its way either."""
        self.index.apply(row, events)
        self._regret.told(row, events)
        if any(isinstance(event, CacheCleared) for event in events):
            self._expected.remove(row)

    def has_room(self, ask: Ask, excluded: Iterable[str], now: float) -> bool:
        """Whether some worker but the excluded ones could begin with the request soon; True, too, if there is none."""
        return has_room(ask, self.workers(ask, excluded), self.reservations.queued(now))

    def place(
        self,
        key: tuple[str, int],
        ask: Ask,
        chains: Iterable[tuple[str, Sequence[bytes]]],
        excluded: Iterable[str],
        *,
        now: float,
        lease: float,
    ) -> Placed:
        """Chooses workers for an attempt (request id, number) and books their load for `lease` seconds at most.

        `chains`: layout and hashes of the prompt's blocks in it; a worker whose layout is missing has nothing cached.
        Raises router.policy.NoWorker.
        """
        numbered = [(self.fleet.layout(layout), hashes) for layout, hashes in chains]
        snapshot = self._snapshot(ask, numbered, excluded, now)
        draw = Draw(self._rng, self._overlap, self._tolerance, self._objectives)
        decision = place(ask, snapshot, policy=self._policy, local_prefill_tokens=self._local_prefill_tokens, draw=draw)
        source = source_for(decision.computing, snapshot)
        self._decisions += 1
        self.fleet.table["taken"][[decision.decode, decision.computing]] = self._decisions
        self.health.sent(key, decision.decode, decision.prefill, now)
        self._book(key, ask, snapshot, decision, source, now=now, lease=lease)
        self._expect({decision.decode, decision.computing}, numbered, now)
        return Placed(decision, snapshot, source)

    def expect(self, rows: Collection[int], chains: Iterable[tuple[str, Sequence[bytes]]], now: float) -> None:
        """These workers will soon hold a prompt that another router placed there."""
        self._expect(rows, [(self.fleet.layout(layout), hashes) for layout, hashes in chains], now)

    def tick(self, now: float) -> None:
        """Now and then: ends what is over."""
        self.reservations.expire(now)
        self._expected.expire(now)
        self._fit.tick(now)
        self._regret.tick()

    def learn(self, reservation: Reservation, measured: Measured) -> None:
        """An attempt that was booked so has ended well, its prompt computed where it was meant to be."""
        prediction, decode = reservation.prediction, reservation.decode
        computing = decode if reservation.prefill is None else reservation.prefill
        if bool(prediction.receiving) == (reservation.prefill is not None):  # otherwise the prefill worker has left
            self._fit.learn(prediction, measured, computing=computing, decode=decode)

    def _expect(self, rows: Collection[int], chains: list[tuple[int, Sequence[bytes]]], now: float) -> None:
        layouts = self.fleet.table["layout"]
        for layout, hashes in chains:
            self._regret.asked(layout, hashes)
            if those := [row for row in rows if layouts[row] == layout]:
                self._expected.expect(those, hashes, now)

    def workers(self, ask: Ask, excluded: Iterable[str]) -> NDArray[np.void]:
        """The table, in which those that are excluded or have another model are not ready."""
        table = self.fleet.table
        if ask.model is not None and (others := table["ready"] & (table["model"] != ask.model)).any():
            table = table.copy()
            table["ready"][others] = False
        if rows := [row for row in map(self.fleet.row, excluded) if row is not None]:
            table = table.copy()
            table["ready"][rows] = False
        return table

    def _snapshot(
        self, ask: Ask, chains: list[tuple[int, Sequence[bytes]]], excluded: Iterable[str], now: float
    ) -> Snapshot:
        """A chain's hashes depend on its layout, so that only workers of this layout hold any of them."""
        table = self.workers(ask, excluded)
        cached = recalled = np.zeros(len(table), np.int32)
        for _, hashes in chains:
            cached = np.maximum(cached, self.index.depths(hashes, len(table)))
            recalled = np.maximum(recalled, self._expected.depths(hashes, len(table)))
        fetchable, tiers = fetchable_tokens(ask, table, cached, fetch_tokens=self._fetch_tokens)
        queued = self.reservations.queued(now)
        peers = slice(None) if ask.model is None else table["model"] == ask.model
        computed, fetched = (mean_rates(table[name][peers]) for name in ("prefill_rate", "fetch_rate"))
        return Snapshot(table, cached, recalled, queued, fetchable, tiers, self.health.apart, float(computed), fetched)

    def _book(
        self,
        key: tuple[str, int],
        ask: Ask,
        snapshot: Snapshot,
        decision: Decision,
        source: int | None,
        *,
        now: float,
        lease: float,
    ) -> None:
        reused = int(snapshot.expected_tokens[decision.computing])
        if source is not None:
            reused = max(reused, int(snapshot.cached_tokens[source]))
        uncached = max(1, ask.prompt_tokens - reused)
        self.reservations.reserve(
            *key,
            Reservation(
                decode=decision.decode,
                prefill=decision.prefill,
                prefill_tokens=uncached,
                decode_tokens=kept_tokens(ask),
                booked=now,
                expires=now + lease,
                predicted_tokens=max(0, ask.prompt_tokens - uncached),
                prediction=decision.prediction,
            ),
        )
