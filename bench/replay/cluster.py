"""The simulated cluster: requests from their arrival to their end, and what workers and routers tell each other.

A request comes to a gateway, which asks a router and sends it to the decode worker one hop later. An aggregated worker
computes it. Otherwise the decode worker finds room for the prompt's KV, then the prefill worker computes the prompt,
the first token goes to the client, and the answer goes on once the KV has moved over the prefill worker's link. What is
to be fetched from another worker is moved before the prompt is computed.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.replay.clock import Clock
from bench.replay.job import BLOCK_SIZE, Job
from bench.replay.oracle import Oracle
from bench.replay.replica import Chooser, Placement, Replica, replica_name
from bench.replay.settings import Settings
from bench.replay.traces import Demand, Trace
from bench.replay.worker import MockWorker, Told
from engine.request import KvEvent, KvEventBatch
from router.fit import Measured

ORACLE = "oracle"
_KEPT = 4096  # messages of events that a worker can send once more
_TICK = 0.25  # seconds; a router that has nothing to tell says so as often
_COALESCE = 0.005  # seconds in which a router gathers what it tells the other routers


@dataclass(slots=True)
class Flight:
    """What became of a request. Times are the clock's."""

    number: int
    demand: Demand
    came_at: float
    chooser: Chooser
    placement: Placement
    prompt: Job | None = None  # as it is computed
    answer: Job | None = None  # as it is decoded, if that is elsewhere
    first_at: float = float("nan")
    ended_at: float = float("nan")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computed for it."""
        return (self.prompt.num_cached_tokens or 0) if self.prompt else 0

    @property
    def fetched_tokens(self) -> int:
        """Those of them that another worker had."""
        return min(self.cached_tokens, self.prompt.num_fetched_tokens) if self.prompt else 0


class Cluster:
    """One replay. `policy` is a router's, or ORACLE."""

    def __init__(self, trace: Trace, rate: float, policy: str, settings: Settings) -> None:
        self.clock = Clock()
        self.settings = settings
        self.flights: list[Flight] = []
        self.place_seconds = 0.0  # of CPU that placements took
        self.lost = 0  # messages of events
        self.fetches = 0
        self.ended = 0
        self._trace = trace
        self._starts = trace.starts(rate).tolist()
        self._rng = random.Random(settings.seed)
        roles = _roles(settings)
        told = Told(self._events, self._reserved, self._first_token, self._job_ended)
        self.workers = [MockWorker(number, role, settings, self.clock, told) for number, role in enumerate(roles)]
        self.replicas: list[Replica] = []
        self._oracle: Oracle | None = None
        if policy == ORACLE:
            self._oracle = Oracle(self.workers, trace.demands, settings)
            self._choosers: list[Chooser] = [self._oracle]
        else:
            self.replicas = [
                Replica(number, policy, roles, settings, settings.seed * 1000 + number)
                for number in range(settings.routers)
            ]
            self._choosers = list(self.replicas)
        self._done: set[int] = set()
        self._followers = defaultdict[int, list[int]](list)  # wait for the answer of a request
        self._flight_of: dict[Job, Flight] = {}
        self._sequences = [0] * len(roles)  # of each worker's messages
        self._kept = [deque[KvEventBatch](maxlen=_KEPT) for _ in roles]
        self._telling: set[int] = set()  # replicas about to tell the others
        if settings.shared_load:
            for replica in self.replicas:
                for number in range(settings.routers):
                    replica.shared.join(replica_name(number), 0.0)

    def run(self, progress: Callable[[], None] = lambda: None) -> None:
        """The whole trace. `progress` is called for each request that ended."""
        self._progress = progress
        self.clock.at(self._starts[0], self._due, 0)
        if self.replicas:
            self.clock.at(0.0, self._tell_loads)
            self.clock.at(0.0, self._tick)
        self.clock.run()

    # A request

    def _due(self, number: int) -> None:
        if number + 1 < len(self._starts):
            self.clock.at(self._starts[number + 1], self._due, number + 1)
        follows = self._trace.demands[number].follows
        if follows is None or follows in self._done:
            self._come(number)
        else:
            self._followers[follows].append(number)

    def _come(self, number: int) -> None:
        demand, chooser = self._trace.demands[number], self._rng.choice(self._choosers)
        began = time.thread_time()
        placement = chooser.place(number, demand, self.clock.now)
        self.place_seconds += time.thread_time() - began
        self._share(chooser)
        flight = Flight(number, demand, self.clock.now, chooser, placement)
        self.flights.append(flight)
        self.clock.after(self.settings.hop, self._at_decode_worker, flight)

    def _at_decode_worker(self, flight: Flight) -> None:
        flight.prompt = self._job(flight, hold=flight.placement.prefill is not None)
        if flight.placement.prefill is None:
            self._at_computing_worker(flight)
        else:
            flight.answer = self._job(flight)
            self.workers[flight.placement.decode].reserve(flight.answer)

    def _reserved(self, job: Job) -> None:
        self.clock.after(self.settings.hop, self._at_computing_worker, self._flight_of[job])

    def _at_computing_worker(self, flight: Flight) -> None:
        worker = self.workers[flight.placement.computing]
        assert flight.prompt is not None
        hashes = flight.demand.hashes[: flight.prompt.num_cacheable_blocks]
        source = None if flight.placement.source is None else self.workers[flight.placement.source]
        own = worker.pool.match(hashes)
        held = source.pool.acquire(hashes[own:]) if source is not None else []
        if source is None or not held:
            worker.submit(flight.prompt)
            return
        tokens, now = len(held) * BLOCK_SIZE, self.clock.now
        lands = self._move(source, tokens)
        self.fetches += 1
        worker.fetch_rate.add(tokens, lands - now, now)
        self.clock.at(lands, self._fetched, flight, source, held, hashes[: own + len(held)])

    def _fetched(self, flight: Flight, source: MockWorker, held: list[int], hashes: list[bytes]) -> None:
        assert flight.prompt is not None
        source.give_back(held)
        worker = self.workers[flight.placement.computing]
        flight.prompt.num_fetched_tokens = worker.store(hashes) * BLOCK_SIZE
        worker.submit(flight.prompt)

    def _first_token(self, job: Job) -> None:
        flight = self._flight_of[job]
        flight.first_at = self.clock.now + self.settings.hop
        if flight.answer is not None and flight.placement.prefill is not None:
            tokens = flight.demand.prompt_tokens - (flight.answer.num_cached_tokens or 0)
            # All but the last step's was pushed while the rest was computed.
            lands = self._move(self.workers[flight.placement.prefill], min(tokens, self.settings.max_batched_tokens))
            self.clock.at(lands, self._landed, flight)

    def _landed(self, flight: Flight) -> None:
        assert flight.prompt is not None and flight.answer is not None and flight.placement.prefill is not None
        self.workers[flight.placement.prefill].release(flight.prompt)
        self.workers[flight.placement.decode].commit(flight.answer)

    def _job_ended(self, job: Job) -> None:
        flight = self._flight_of[job]
        flight.ended_at = self.clock.now + self.settings.hop
        for one in (flight.prompt, flight.answer):
            if one is not None:
                del self._flight_of[one]
        self.clock.after(2 * self.settings.hop, self._release, flight)

    def _release(self, flight: Flight) -> None:
        ttft, decode_seconds = flight.first_at - flight.came_at, flight.ended_at - flight.first_at
        flight.chooser.release(flight.number, Measured(ttft, flight.demand.output_tokens, decode_seconds))
        self._share(flight.chooser)
        self.ended += 1
        self._done.add(flight.number)
        for follower in self._followers.pop(flight.number, ()):
            self._come(follower)
        self._progress()

    def _job(self, flight: Flight, hold: bool = False) -> Job:
        demand = flight.demand
        job = Job(flight.number, demand.prompt_tokens, demand.output_tokens, demand.hashes, hold)
        self._flight_of[job] = flight
        return job

    def _move(self, source: MockWorker, tokens: int) -> float:
        """When so many tokens' KV has landed: one after the other goes over a worker's link."""
        timing = self.settings.timing
        lands = max(self.clock.now, source.link_free_at) + timing.transfer(tokens)
        source.link_free_at = lands - timing.link_latency
        return lands

    # What routers are told

    def _events(self, worker: MockWorker, events: list[KvEvent]) -> None:
        if self._oracle is not None:
            self._oracle.hear(events)
            return
        self._sequences[worker.number] += 1
        batch = KvEventBatch("", self._sequences[worker.number], events)
        self._kept[worker.number].append(batch)
        self.clock.after(self.settings.event_delay, self._hear, worker.number, batch)

    def _hear(self, worker: int, batch: KvEventBatch) -> None:
        for replica in self.replicas:
            if self.settings.lost_events and self._rng.random() < self.settings.lost_events:
                self.lost += 1
            elif not replica.hear(worker, batch):
                self.clock.after(self.settings.hop, self._asked, worker, replica)

    def _asked(self, worker: int, replica: Replica) -> None:
        """A router misses events of a worker: it is given those, or all hashes if they are not kept any more."""
        known, kept = replica.known(worker), self._kept[worker]
        if known is not None and kept and kept[0].sequence <= known + 1:
            missing = [batch for batch in kept if batch.sequence > known]
            self.clock.after(self.settings.hop, replica.take_missing, worker, missing)
        else:
            sequence, hashes = self._sequences[worker], self.workers[worker].pool.hashes()
            self.clock.after(self.settings.hop, replica.take_snapshot, worker, sequence, hashes)

    def _tell_loads(self) -> None:
        now = self.clock.now
        waiting = np.array([worker.waiting_for_blocks for worker in self.workers], np.int32)
        prefill_rates = np.array([worker.prefill_rate.per_second for worker in self.workers])
        fetch_rates = np.array([worker.fetch_rate.lately(now) for worker in self.workers])
        for replica in self.replicas:
            self.clock.after(self.settings.hop, replica.hear_loads, waiting, prefill_rates, fetch_rates)
        self.beat()
        if self.ended < len(self._starts):
            self.clock.after(self.settings.load_seconds, self._tell_loads)

    def beat(self) -> None:
        """Workers say what their last events were."""
        for number, sequence in enumerate(self._sequences):
            self.clock.after(self.settings.event_delay, self._hear, number, KvEventBatch("", sequence, []))

    def _tick(self) -> None:
        for replica in self.replicas:
            replica.placer.tick(self.clock.now)
            replica.shared.tick(self.clock.now)
            self._tell_others(replica)
        if self.ended < len(self._starts):
            self.clock.after(_TICK, self._tick)

    def _share(self, chooser: Chooser) -> None:
        """A replica that has something to tell the others does so, together with what comes at once after it."""
        if isinstance(chooser, Replica) and chooser.shared.news and chooser.number not in self._telling:
            self._telling.add(chooser.number)
            self.clock.after(_COALESCE, self._tell_others, chooser)

    def _tell_others(self, replica: Replica) -> None:
        self._telling.discard(replica.number)
        if (message := replica.shared.message(self.clock.now)) is not None:
            for other in self.replicas:
                if other is not replica:
                    self.clock.after(self.settings.hop, self._take_in, other, message)

    def _take_in(self, replica: Replica, message: bytes) -> None:
        replica.shared.take_in(message, self.clock.now)


def _roles(settings: Settings) -> list[str]:
    if not settings.prefill_workers:
        return ["aggregated"] * settings.workers
    return ["prefill"] * settings.prefill_workers + ["decode"] * (settings.workers - settings.prefill_workers)
