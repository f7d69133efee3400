"""The watch over the caches of all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog
import zmq

from engine.hashing import test_vector
from engine.request import KvEvent
from router.placer import Placer
from router.tiers import by_row, held_by_row
from services.cache_watcher import CacheWatcher
from services.router.metrics import CACHE_STATES, RouterMetrics
from services.rpc import cluster_pb2
from services.security import ClusterKey

log = structlog.get_logger()

_SWEEP_SECONDS = 0.005  # between two parts of a removal


def hashes_alike(member: cluster_pb2.Member) -> bool:
    """Whether a worker names blocks as this process does."""
    return member.model.hash_vector == test_vector()


@dataclass(frozen=True, slots=True)
class _Rows:
    """The router's index has what the worker, or the KV service, of these rows has, by tier."""

    rows: Mapping[int, int]
    placer: Placer
    metrics: RouterMetrics

    def replacing(self, held: Mapping[str, Sequence[bytes]]) -> Iterator[None]:
        for row, hashes in held_by_row(held, self.rows):
            yield from self.placer.index.replacing(row, hashes)

    def told(self, events: Sequence[KvEvent]) -> None:
        for row, changes in by_row(events, self.rows):
            self.placer.told(row, changes)

    def asked(self, *, snapshot: bool) -> None:
        (self.metrics.resyncs if snapshot else self.metrics.replays).inc()


class Watchers:
    """One for each member whose events can be followed, by its first row; workers without are placed by load."""

    def __init__(self, placer: Placer, key: ClusterKey | None, metrics: RouterMetrics) -> None:
        self._placer = placer
        self._key = key
        self._metrics = metrics
        self._watchers: dict[int, CacheWatcher | None] = {}
        self._names: dict[int, str] = {}
        self._refused: set[int] = set()
        self._silent: set[int] = set()  # that was said of
        self._sweeping = False

    def join(self, rows: Mapping[int, int], member: cluster_pb2.Member) -> None:
        """Begins to follow a worker or KV service, whose rows these are, by tier."""
        row = next(iter(rows.values()))
        self._names[row] = member.name
        self._watchers[row] = None
        if not hashes_alike(member):
            self._refused.add(row)
            log.warning("a worker hashes blocks otherwise; it is placed by load alone", worker=member.name)
            return
        try:
            self._watchers[row] = CacheWatcher(member, _Rows(rows, self._placer, self._metrics), self._key)
        except zmq.ZMQError as error:
            log.warning("a worker's KV events cannot be followed", worker=member.name, error=str(error))

    def leave(self, row: int) -> None:
        """A worker is gone; the caller clears the index."""
        if watcher := self._watchers.pop(row, None):
            watcher.stop()
        self._refused.discard(row)
        self._silent.discard(row)
        self._names.pop(row, None)
        self.sweep()

    def states(self, now: float) -> dict[str, int]:
        """How many workers there are in each of CACHE_STATES."""
        counts = dict.fromkeys(CACHE_STATES, 0)
        for row in self._watchers:
            counts[self._state(row, now)] += 1
        return counts

    def tick(self, now: float) -> None:
        """Once a second: says of a worker once that nothing is heard from it."""
        silent = {row for row in self._watchers if self._state(row, now) == "silent"}
        for row in silent - self._silent:
            log.warning(
                "a worker's KV events do not come; it is placed by what is expected of it", worker=self._names[row]
            )
        self._silent = silent
        self.sweep()

    def sweep(self) -> None:
        """Goes on with removals, between placements, until they are done."""
        if not self._sweeping and self._placer.index.sweep():
            self._sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._sweeping = False
        self.sweep()

    def _state(self, row: int, now: float) -> str:
        watcher = self._watchers[row]
        if row in self._refused:
            return "refused"
        if watcher is None or watcher.is_silent(now):
            return "silent"
        return "known" if watcher.knows else "unknown"
