"""A router of the simulated cluster: its own `Placer` and index, told what a router process is told."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import TIERS, KvEventBatch
from planner.simulator.demand import Demand
from planner.simulator.settings import Settings
from router.feed import Feed, Verdict
from router.fit import Measured
from router.placer import Placer
from router.policies import session_key
from router.shared_load import SharedLoad
from router.snapshot import Ask
from router.tiers import by_row, held_by_row
from router.tiers import number as number_of

_DECODING = ("decode", "aggregated")
_LAYOUT = "simulated"
_KV = f"{'kv':>032}"  # name of the KV service
_SESSION_BLOCKS = 4  # which keep prompts together that name no session, as in the router's process
_LEASE = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """Numbers of workers."""

    decode: int
    prefill: int | None
    source: int | None  # from which the beginning of the prompt is fetched: the KV service comes behind all workers
    tier: str = ""  # of the KV service, no further than which is to be looked

    @property
    def computing(self) -> int:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


class Chooser(Protocol):
    """Places requests: a router, or the oracle."""

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """Where request `number` goes."""
        ...

    def release(self, number: int, measured: Measured | None) -> None:
        """Its end was told, and what it took; None: it failed."""
        ...


def replica_name(number: int) -> str:
    """By which the other routers know it."""
    return f"router{number}"


class Replica:
    """One router. Workers are rows of its table in the order of their numbers."""

    def __init__(self, number: int, policy: str, roles: Sequence[str], settings: Settings, seed: int) -> None:
        self.number = number
        self.placer = Placer(
            policy=policy,
            local_prefill_tokens=settings.local_prefill_tokens,
            fetch_tokens=settings.fetch_tokens,
            seed=seed,
        )
        self.shared = SharedLoad(replica_name(number), self.placer)
        self.replays = 0  # of missing events
        self.snapshots = 0
        self._asking: set[int] = set()
        self._peer_fetch = settings.peer_fetch
        self._block_size = settings.block_size
        self._feeds = [Feed() for _ in range(len(roles) + bool(settings.kv.tiers))]
        self._kv_rows: dict[int, int] = {}  # by tier
        for row, role in enumerate(roles):
            self._join(row)
            self.set_role(row, role, ready=True)
        for row, tier in enumerate(settings.kv.tiers, len(roles)):
            self._kv_rows[number_of(tier)] = row
            self._join(row, number_of(tier))
            self.set_role(row, "kv", ready=True)

    def _join(self, row: int, tier: int = 0) -> None:
        fleet = self.placer.fleet
        joined = fleet.join(_KV if tier else f"{row:032x}", tier)
        assert joined == row
        fleet.set(
            row,
            fetches=not tier,
            sends=bool(tier) or self._peer_fetch,
            layout=fleet.layout(_LAYOUT),
            block_size=self._block_size,
            free_tokens=math.inf,  # not told
            prefill_rate=math.nan,
        )
        self._feeds[min(row, len(self._feeds) - 1)].snapshot(0)

    def set_role(self, row: int, role: str, *, ready: bool) -> None:
        """What a worker is, and whether it may get requests."""
        self.placer.fleet.set(
            row, ready=ready, prefills=role == "prefill", decodes=role in _DECODING, aggregated=role == "aggregated"
        )

    def leave(self, row: int) -> None:
        """A worker is gone; its row is another's, that has nothing yet."""
        self.placer.leave(f"{row:032x}")
        self._asking.discard(row)
        self._feeds[row] = Feed()
        self._join(row)

    def has_room(self, demand: Demand, now: float) -> bool:
        """Whether some worker could begin soon."""
        return self.placer.has_room(Ask(demand.prompt_tokens, demand.output_tokens), (), now)

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """As the router's process does."""
        hashes, key = demand.prompt_hashes, (str(number), 0)
        ask = Ask(demand.prompt_tokens, demand.output_tokens, session=session_key(b"".join(hashes[:_SESSION_BLOCKS])))
        chains = [(_LAYOUT, hashes)]
        placed = self.placer.place(key, ask, chains, (), now=now, lease=_LEASE)
        self.shared.booked(key, chains)
        source, tier = placed.source, ""
        if source is not None and (kind := int(placed.snapshot.table["tier"][source])):
            source, tier = len(self._feeds) - 1, TIERS[kind - 1]
        return Placement(placed.decision.decode, placed.decision.prefill, source, tier)

    def release(self, number: int, measured: Measured | None) -> None:
        """Ends the booking, and learns."""
        booked = self.placer.reservations.release(str(number), 0)
        if booked is not None and measured is not None:
            self.placer.learn(booked, measured)
        self.shared.released((str(number), 0))

    def hear(self, worker: int, batch: KvEventBatch) -> bool:
        """Events came, or none, which says what the last ones were. False: some are missing, and to be asked for."""
        if worker in self._asking:
            return True  # what is asked for has these, too
        feed = self._feeds[worker]
        missing = feed.lags(batch.sequence) if not batch.events else not self._apply(worker, batch)
        if missing:
            self._asking.add(worker)
        return not missing

    def known(self, worker: int) -> int | None:
        """The last message of its events that was applied."""
        return self._feeds[worker].sequence

    def take_missing(self, worker: int, batches: list[KvEventBatch]) -> None:
        """What was asked for."""
        self.replays += 1
        self._asking.discard(worker)
        for batch in batches:
            self._apply(worker, batch)

    def take_snapshot(self, worker: int, sequence: int, held: Mapping[str, Sequence[bytes]]) -> None:
        """All that a worker holds after batch `sequence`, or in each tier the KV service."""
        self.snapshots += 1
        self._asking.discard(worker)
        for row, hashes in held_by_row(held, self._rows(worker)):
            self.placer.index.replace(row, hashes)
        self._feeds[worker].snapshot(sequence)

    def _apply(self, worker: int, batch: KvEventBatch) -> bool:
        verdict = self._feeds[worker].judge(batch.sequence)
        if verdict is Verdict.APPLY:
            for row, changes in by_row(batch.events, self._rows(worker)):
                self.placer.told(row, changes)
        return verdict in (Verdict.APPLY, Verdict.IGNORE)

    def _rows(self, holder: int) -> dict[int, int]:
        """By tier."""
        return self._kv_rows if self._kv_rows and holder == len(self._feeds) - 1 else {0: holder}

    def hear_loads(self, waiting: NDArray[np.int32], rates: Mapping[str, NDArray[np.float64]]) -> None:
        """Loads of all workers came, `[workers]` each; `rates` by column."""
        table, count = self.placer.fleet.table, len(waiting)
        table["waiting_for_blocks"][:count] = waiting
        for column, of_all in rates.items():
            table[column][:count] = of_all
