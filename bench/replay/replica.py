"""A router of the simulated cluster: its own `Placer` and index, told what a router process is told."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.replay.job import BLOCK_SIZE
from bench.replay.settings import Settings
from bench.replay.traces import Demand
from engine.request import KvEventBatch
from router.feed import Feed, Verdict
from router.fit import Measured
from router.placer import Placer
from router.policies import session_key
from router.shared_load import SharedLoad
from router.snapshot import Ask

_LAYOUT = "simulated"
_SESSION_BLOCKS = 4  # which keep prompts together that name no session, as in the router's process
_LEASE = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """Numbers of workers."""

    decode: int
    prefill: int | None
    source: int | None  # from which the beginning of the prompt is fetched

    @property
    def computing(self) -> int:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


class Chooser(Protocol):
    """Places requests: a router, or the oracle."""

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """Where request `number` goes."""
        ...

    def release(self, number: int, measured: Measured) -> None:
        """Its end was told, and what it took."""
        ...


def replica_name(number: int) -> str:
    """By which the other routers know it."""
    return f"router{number}"


class Replica:
    """One router. Workers are rows of its table in the order of their numbers."""

    def __init__(self, number: int, policy: str, roles: list[str], settings: Settings, seed: int) -> None:
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
        self._feeds = [Feed() for _ in roles]
        fleet = self.placer.fleet
        for number, role in enumerate(roles):
            row = fleet.join(f"{number:032x}")
            assert row == number
            fleet.set(
                row,
                ready=True,
                prefills=role == "prefill",
                decodes=role != "prefill",
                aggregated=role == "aggregated",
                fetches=True,
                sends=True,
                layout=fleet.layout(_LAYOUT),
                block_size=BLOCK_SIZE,
                prefill_rate=math.nan,
                fetch_rate=math.nan,
            )
            self._feeds[number].snapshot(0)

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """As the router's process does."""
        hashes, key = demand.prompt_hashes, (str(number), 0)
        ask = Ask(demand.prompt_tokens, demand.output_tokens, session=session_key(b"".join(hashes[:_SESSION_BLOCKS])))
        chains = [(_LAYOUT, hashes)]
        placed = self.placer.place(key, ask, chains, (), now=now, lease=_LEASE)
        self.shared.booked(key, chains)
        return Placement(placed.decision.decode, placed.decision.prefill, placed.source)

    def release(self, number: int, measured: Measured) -> None:
        """Ends the booking, and learns."""
        if (booked := self.placer.reservations.release(str(number), 0)) is not None:
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

    def take_snapshot(self, worker: int, sequence: int, hashes: list[bytes]) -> None:
        """All that a worker holds after batch `sequence`."""
        self.snapshots += 1
        self._asking.discard(worker)
        self.placer.index.replace(worker, hashes)
        self._feeds[worker].snapshot(sequence)

    def _apply(self, worker: int, batch: KvEventBatch) -> bool:
        verdict = self._feeds[worker].judge(batch.sequence)
        if verdict is Verdict.APPLY:
            self.placer.told(worker, batch.events)
        return verdict in (Verdict.APPLY, Verdict.IGNORE)

    def hear_loads(
        self, waiting: NDArray[np.int32], prefill_rates: NDArray[np.float64], fetch_rates: NDArray[np.float64]
    ) -> None:
        """Loads of all workers came, `[workers]` each."""
        table, count = self.placer.fleet.table, len(waiting)
        table["waiting_for_blocks"][:count] = waiting
        table["prefill_rate"][:count] = prefill_rates
        table["fetch_rate"][:count] = fetch_rates
