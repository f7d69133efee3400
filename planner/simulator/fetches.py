"""Beginnings of prompts that come from where they are cached: another worker, or the KV service.

As `services.worker.receiving`: who fetches waits no longer than it would compute what it fetches, and then computes it;
what is on its way to a worker already is not ordered twice. A worker sends one thing after another; what lies in the KV
service's memory each worker reads by itself (`kv_transfer.connectors.lent_memory`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.simulator.clock import Clock
from planner.simulator.job import Job
from planner.simulator.kv_service import READ_BYTES, KvService, Restore
from planner.simulator.settings import Settings
from planner.simulator.worker import MockWorker


@dataclass(slots=True)
class _Fetch:
    """One that is under way, and the jobs that wait for it."""

    worker: MockWorker
    hashes: list[bytes]  # from the beginning of the prompt on
    own: int  # of them, that the worker has
    began: float
    jobs: list[Job] = field(default_factory=list)
    tier: str = ""  # of the KV service, no further than which is looked; empty: a worker sends


class Fetches:
    """All of a cluster."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.ordered = 0
        self.late = 0  # given up, as computing would have been done
        self._timing = settings.timing
        self._block_size = settings.block_size
        self._clock = clock
        self._under_way: dict[tuple[int, bytes], _Fetch] = {}

    def submit(self, job: Job, worker: MockWorker, source: MockWorker | KvService | None, tier: str = "") -> None:
        """Has the worker compute the prompt, behind what it fetches; the KV service looks no further than in `tier`."""
        hashes = job.hashes[: job.num_cacheable_blocks]
        own = worker.pool.match(hashes)
        if isinstance(source, KvService):
            there = source.leading(hashes, tier)
        else:
            there = 0 if source is None else source.leading(hashes)
        if source is None or there <= own:
            worker.submit(job)
            return
        key = worker.number, hashes[there - 1]
        if (under_way := self._under_way.get(key)) is not None:
            under_way.jobs.append(job)
            return
        fetch = _Fetch(worker, hashes[:there], own, self._clock.now, [job], tier)
        if isinstance(source, KvService):
            began = self._from_tiers(fetch, source, key)
        else:
            began = self._from_peer(fetch, source, key)
        if began:
            self.ordered += 1
            self._under_way[key] = fetch
        else:
            worker.submit(job)

    def move(self, source: MockWorker, tokens: int) -> float:
        """When so many tokens' KV has landed: one after the other goes over a worker's link."""
        timing = source.offer.timing
        lands = max(self._clock.now, source.link_free_at) + timing.transfer(tokens)
        source.link_free_at = lands - timing.link_latency
        return lands

    # Inside

    def _from_peer(self, fetch: _Fetch, source: MockWorker, key: tuple[int, bytes]) -> bool:
        held = source.pool.acquire(fetch.hashes[fetch.own :])
        if not held:
            return False

        def end(landed: bool) -> None:
            source.give_back(held, copied=landed)

        timing = source.offer.timing
        lands = max(self._clock.now, source.link_free_at) + timing.transfer(len(held) * self._block_size)
        free_at, latency = source.link_free_at, timing.link_latency
        source.link_free_at = self._await(fetch, len(held), free_at, latency, lands, key, end, [])
        return True

    def _from_tiers(self, fetch: _Fetch, source: KvService, key: tuple[int, bytes]) -> bool:
        restore: Restore = source.begin(fetch.hashes, fetch.tier, self._deadline(fetch))
        count = len(restore.tiers)

        def end(landed: bool) -> None:
            source.end(fetch.hashes[:count])

        if count <= fetch.own:
            deadline = self._deadline(fetch)
            then = self._is_late if restore.ready_at > deadline else self._refused
            self._clock.at(min(deadline, restore.ready_at), then, fetch, key, end)
            return True
        tokens = (count - fetch.own) * self._block_size
        worker, latency, tiers = fetch.worker, self._timing.host_latency, restore.tiers[fetch.own :]
        free_at = worker.restores_free_at
        lands = max(restore.ready_at, free_at) + self._timing.restore(tokens)
        worker.restores_free_at = self._await(fetch, len(tiers), free_at, latency, lands, key, end, tiers)
        return True

    def _deadline(self, fetch: _Fetch) -> float:
        """When computing what is asked for would have been done."""
        return fetch.began + fetch.worker.computing_seconds((len(fetch.hashes) - fetch.own) * self._block_size)

    def _await(
        self,
        fetch: _Fetch,
        count: int,
        link_free_at: float,
        latency: float,
        lands: float,
        key: tuple[int, bytes],
        end: Callable[[bool], None],
        tiers: list[str],
    ) -> float:
        """Until so many blocks have come or it is too late; when the link is free then."""
        deadline = self._deadline(fetch)
        if lands <= deadline:
            self._clock.at(lands, self._landed, fetch, count, key, end, tiers)
            return lands - latency
        self._clock.at(deadline, self._is_late, fetch, key, end)
        return max(link_free_at, deadline)  # what was begun is ended

    def _landed(
        self, fetch: _Fetch, count: int, key: tuple[int, bytes], end: Callable[[bool], None], tiers: list[str]
    ) -> None:
        end(True)
        del self._under_way[key]
        worker, now = fetch.worker, self._clock.now
        worker.fetch_rates[fetch.tier].add(count * self._block_size, now - fetch.began, now)
        new = worker.store(fetch.hashes[: fetch.own + count])
        restored = {tier: blocks * self._block_size for tier, blocks in Counter(tiers[count - new :]).items()}
        for job in fetch.jobs:
            job.num_fetched_tokens = new * self._block_size
            job.restored = restored
            worker.submit(job)

    def _is_late(self, fetch: _Fetch, key: tuple[int, bytes], end: Callable[[bool], None]) -> None:
        self.late += 1
        fetch.worker.fetch_rates[fetch.tier].late(self._clock.now - fetch.began, self._clock.now)
        self._give_up(fetch, key, end)

    def _refused(self, fetch: _Fetch, key: tuple[int, bytes], end: Callable[[bool], None]) -> None:
        """With its first part, which is less than a block here, a store has shown that the rest would be late."""
        tokens = int(READ_BYTES / self._timing.token_bytes)
        fetch.worker.fetch_rates[fetch.tier].add(tokens, self._clock.now - fetch.began, self._clock.now)
        self._give_up(fetch, key, end)

    def _give_up(self, fetch: _Fetch, key: tuple[int, bytes], end: Callable[[bool], None]) -> None:
        end(False)
        del self._under_way[key]
        for job in fetch.jobs:
            fetch.worker.submit(job)
