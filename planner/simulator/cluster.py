"""The simulated cluster: requests from their arrival to their end, and what workers and routers tell each other.

A request comes to a gateway, which asks a router and sends it to the decode worker one hop later. An aggregated worker
computes it. Otherwise the decode worker finds room for the prompt's KV, then the prefill worker computes the prompt,
the first token goes to the client, and the answer goes on once the KV has moved over the prefill worker's link. What is
to be fetched from another worker, or from the KV service, is moved before the prompt is computed.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine.request import BlockStored, KvEvent, KvEventBatch
from engine.sequence import State
from planner.simulator.clock import Clock
from planner.simulator.control_plane import ControlPlane
from planner.simulator.demand import Demand, Trace
from planner.simulator.fetches import Fetches
from planner.simulator.job import BLOCK_SIZE, Job
from planner.simulator.kv_service import KvService
from planner.simulator.members import Members
from planner.simulator.oracle import Oracle
from planner.simulator.replica import Chooser, Placement, Replica, replica_name
from planner.simulator.settings import Settings
from planner.simulator.streams import Streams, enough_gateways
from planner.simulator.worker import MockWorker, Told, untold
from planner.window import Role
from router.fit import Measured

ORACLE = "oracle"
_KEPT = 4096  # messages of events that a worker can send once more
_TICK = 0.25  # seconds; a router that has nothing to tell says so as often
_COALESCE = 0.005  # seconds in which a router gathers what it tells the other routers


@dataclass(slots=True, eq=False)
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
    known: int = 0  # tokens of the answer when it was placed
    produced: int = 0  # when a worker failed
    lost: bool = False  # then, and another flight goes on with it

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_at - self.came_at

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 where there is none."""
        gaps = self.demand.output_tokens - 1
        return (self.ended_at - self.first_at) / gaps if gaps else 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computed for it."""
        return (self.prompt.num_cached_tokens or 0) if self.prompt else 0

    @property
    def fetched_tokens(self) -> int:
        """Those of them that came from another worker, or from the KV service."""
        return min(self.cached_tokens, self.prompt.num_fetched_tokens) if self.prompt else 0

    @property
    def restored_tokens(self) -> int:
        """Those of them that came from the KV service."""
        return min(self.cached_tokens, sum(self.restored_by.values()))

    @property
    def restored_by(self) -> dict[str, int]:
        """The same by tier."""
        return self.prompt.restored if self.prompt else {}


class Cluster:
    """One replay. `policy` is a router's, or ORACLE.

    Raises ValueError where the trace has blocks of another size than the settings, or nobody can count such blocks, and
    where the oracle is to know workers that come or fail.
    """

    def __init__(self, trace: Trace, rate: float, policy: str, settings: Settings) -> None:
        if any(demand.block_size != settings.block_size for demand in trace.demands):
            raise ValueError(f"{trace.name}: its blocks are of another size than {settings.block_size} tokens")
        if settings.block_size != BLOCK_SIZE and (settings.kv.host_tokens or policy == ORACLE):
            raise ValueError(f"tiers and the oracle count in blocks of {BLOCK_SIZE} tokens")
        if policy == ORACLE and (settings.slots or settings.failures):
            raise ValueError("the oracle knows the workers of the beginning alone: none can come, leave or fail")
        self.clock = Clock()
        self.settings = settings
        self.flights: list[Flight] = []
        self.place_seconds = 0.0  # of CPU that placements took
        self.lost = 0  # messages of events
        self.ended = 0
        self._trace = trace
        self._starts = trace.starts(rate).tolist()
        self._rng = random.Random(settings.seed)
        roles = _roles(settings)
        self._streams: Streams | None = None
        if settings.control is None and (settings.timing.gateway_token or settings.timing.gateway_request):
            gateways = settings.gateways or enough_gateways(trace, rate, settings.timing)
            self._streams = Streams(settings.timing, gateways, self.clock)
        steps = self._streams.steps if self._streams is not None else untold
        told = Told(self._events, self._reserved, self._first_token, self._job_ended, steps)

        def make(number: int, role: Role) -> MockWorker:
            return MockWorker(number, role, settings, self.clock, told)

        self.workers = [make(number, role) for number, role in enumerate(roles)]
        self.fetches = Fetches(settings, self.clock)
        self.kv: KvService | None = None
        if settings.kv.host_tokens:
            self.kv = KvService(len(roles), settings, self.clock, self.workers, trace.demands, self._kv_events)
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
        self.plane: ControlPlane | None = None
        if settings.control is not None and self.replicas:
            self.plane = ControlPlane(settings.control, settings.routers, self.clock)
        self.members = Members(roles, settings, self.clock, self.workers, self.replicas, make)
        self.shed = 0.0  # share of the requests that is refused
        self.refused: list[int] = []
        self.ended_at = 0.0  # when the last request was over; some things go on behind it
        self.on_come: Callable[[Demand], None] = lambda demand: None
        self.on_end: Callable[[Flight], None] = lambda flight: None
        self._line = deque[tuple[int, float, Flight | None]]()  # requests that nobody has room for
        self._flying: dict[int, Flight] = {}  # placed and not ended
        self._done: set[int] = set()
        self._followers = defaultdict[int, list[int]](list)  # wait for the answer of a request
        self._flight_of: dict[Job, Flight] = {}
        # Of each worker's messages, and the KV service's.
        self._sequences = [0] * (len(roles) + (self.kv is not None))
        self._kept = [deque[KvEventBatch](maxlen=_KEPT) for _ in self._sequences]
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
        if self.settings.failures:
            self._fail_later()
        self.clock.run()

    @property
    def demands(self) -> list[Demand]:
        """Of the trace."""
        return self._trace.demands

    @property
    def done(self) -> bool:
        """All requests are over."""
        return self.ended >= len(self._starts)

    @property
    def queued(self) -> int:
        """Requests whose prompts wait for others to be computed, or for room."""
        return len(self._line) + sum(len(worker.waiting) + worker.waiting_for_blocks for worker in self.workers)

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
        self.on_come(self._trace.demands[number])
        if self.shed and self._rng.random() < self.shed:
            self.refused.append(number)
            self._over(number)
        elif self.plane is not None:
            self.plane.ask(number, partial(self._line_up, number, self.clock.now, None))
        elif self._streams is not None:
            read = self._streams.read(number, self._trace.demands[number].prompt_tokens)
            self.clock.at(read, self._line_up, number, self.clock.now, None)
        else:
            self._line_up(number, self.clock.now, None)

    def _line_up(self, number: int, came_at: float, before: Flight | None) -> None:
        """`before`: what a failed worker had of it."""
        self._line.append((number, came_at, before))
        self._call_line()

    def _has_room(self, number: int) -> bool:
        """Where the number of workers is fixed, requests wait at workers."""
        if not self.members.serving:
            return False
        return not self.settings.slots or all(
            replica.has_room(self._trace.demands[number], self.clock.now) for replica in self.replicas
        )

    def _call_line(self) -> None:
        """Those whose turn it is, as long as there is room."""
        while self._line and self._has_room(self._line[0][0]):
            self._place(*self._line.popleft())

    def _place(self, number: int, came_at: float, before: Flight | None) -> None:
        demand = self._trace.demands[number]
        chooser = self._rng.choice(self._choosers) if self.plane is None else self.replicas[self.plane.router(number)]
        if self.kv is not None:
            self.kv.came(demand)
        asked = demand
        if before is not None:
            known = before.produced
            asked = replace(
                demand, prompt_tokens=demand.prompt_tokens + known, output_tokens=demand.output_tokens - known
            )
        began = time.thread_time()
        placement = chooser.place(number, asked, self.clock.now)
        self.place_seconds += time.thread_time() - began
        self._share(chooser)
        flight = self._flying[number] = Flight(number, demand, came_at, chooser, placement)
        if before is None:
            self.flights.append(flight)
        else:
            flight.known, flight.first_at = before.produced, before.first_at
            self.flights[self.flights.index(before)] = flight
        self.members.takes(number, placement.decode, placement.prefill)
        arrival = self.workers[placement.computing].offer.timing.arrival(asked.prompt_tokens)
        goes = self.clock.now
        if self._streams is not None:  # what it has had of the gateway's time is no more to come
            goes = self._streams.free_at(number)
            arrival = max(0.0, arrival - self._streams.service(asked.prompt_tokens))
        self.clock.at(goes + (self.settings.hop + arrival), self._at_decode_worker, flight)

    def _at_decode_worker(self, flight: Flight) -> None:
        if flight.lost:
            return
        flight.prompt = self._job(flight, hold=flight.placement.prefill is not None)
        if flight.placement.prefill is None:
            self._at_computing_worker(flight)
        else:
            flight.answer = self._job(flight)
            self.workers[flight.placement.decode].reserve(flight.answer)

    def _reserved(self, job: Job) -> None:
        self.clock.after(self.settings.hop, self._at_computing_worker, self._flight_of[job])

    def _at_computing_worker(self, flight: Flight) -> None:
        if flight.lost:
            return
        assert flight.prompt is not None
        source, computing = flight.placement.source, self.workers[flight.placement.computing]
        holder = None if source is None else self._holder(source)
        self.fetches.submit(flight.prompt, computing, holder, flight.placement.tier)

    def _holder(self, number: int) -> MockWorker | KvService:
        return self.kv if self.kv is not None and number == self.kv.number else self.workers[number]

    def _first_token(self, job: Job) -> None:
        flight = self._flight_of[job]
        if not flight.known:
            told = self.clock.now if self._streams is None else self._streams.token(flight.number)
            if self.plane is not None:
                told = self.plane.first_token(flight.number, flight.demand.output_tokens)
            flight.first_at = told + self.settings.hop
        if flight.answer is not None and flight.placement.prefill is not None:
            tokens = flight.demand.prompt_tokens - (flight.answer.num_cached_tokens or 0)
            # All but the last step's was pushed while the rest was computed.
            sender = self.workers[flight.placement.prefill]
            lands = self.fetches.move(sender, min(tokens, sender.offer.max_batched_tokens))
            self.clock.at(lands, self._landed, flight)

    def _landed(self, flight: Flight) -> None:
        if flight.lost:
            return
        assert flight.prompt is not None and flight.answer is not None and flight.placement.prefill is not None
        self.workers[flight.placement.prefill].release(flight.prompt)
        self.members.leaves(flight.number, flight.placement.prefill)
        self.workers[flight.placement.decode].commit(flight.answer)

    def _job_ended(self, job: Job) -> None:
        flight = self._flight_of[job]
        told = self.clock.now if self._streams is None else self._streams.free_at(flight.number)
        if self.plane is not None:
            gaps = max(1, flight.demand.output_tokens - 1)
            told = self.plane.last_token(flight.number, (told - flight.first_at) / gaps)
        flight.ended_at = told + self.settings.hop
        for one in (flight.prompt, flight.answer):
            if one is not None:
                del self._flight_of[one]
        self.members.leaves(flight.number, flight.placement.decode)
        del self._flying[flight.number]
        self.on_end(flight)
        self.clock.after(2 * self.settings.hop, self._release, flight)

    def _release(self, flight: Flight) -> None:
        ttft, decode_seconds = flight.first_at - flight.came_at, flight.ended_at - flight.first_at
        flight.chooser.release(flight.number, Measured(ttft, flight.demand.output_tokens, decode_seconds))
        self._share(flight.chooser)
        self._over(flight.number)
        self._call_line()

    def _over(self, number: int) -> None:
        self.ended += 1
        self._done.add(number)
        for follower in self._followers.pop(number, ()):
            self.clock.after(self._trace.demands[follower].think, self._come, follower)
        if self.done:
            self.ended_at = self.clock.now
            self.members.stop_counting()
        self._progress()

    # Failures

    def _fail_later(self) -> None:
        seconds = 3600 / self.settings.failures / max(1, len(self.members.ready()))
        self.clock.after(self._rng.expovariate(1 / seconds), self._fail)

    def _fail(self) -> None:
        """Some worker that is ready."""
        if self.done:
            return
        if ready := self.members.ready():
            self.fail(self._rng.choice(ready))
        self._fail_later()

    def fail(self, number: int) -> None:
        """A worker fails, and what it had is placed again, with what is known of the answers."""
        for flight in [self._flying[each] for each in self.members.needed_by(number)]:
            placement, flight.lost = flight.placement, True
            for job, where in ((flight.prompt, placement.computing), (flight.answer, placement.decode)):
                if job is None or job.state is State.FINISHED:
                    continue
                flight.produced = max(flight.produced, flight.known + self.workers[where].produced(job))
                del self._flight_of[job]
                if where == number:
                    job.state = State.FINISHED
                else:
                    self.workers[where].abort(job)
            self.members.leaves(flight.number, placement.decode, placement.prefill)
            flight.chooser.release(flight.number, None)
            self._share(flight.chooser)
            self.clock.after(self.settings.detect_seconds, self._line_up, flight.number, flight.came_at, flight)
        if self._streams is not None:
            self._streams.failed(number)
        self.members.fail(number)

    def _job(self, flight: Flight, hold: bool = False) -> Job:
        demand, known = flight.demand, flight.known
        job = Job(flight.number, demand.prompt_tokens + known, demand.output_tokens - known, demand.hashes, hold)
        job.block_size = self.settings.block_size
        self._flight_of[job] = flight
        return job

    # What routers are told

    def _events(self, worker: MockWorker, events: list[KvEvent]) -> None:
        if worker is not self.workers[worker.number]:
            return  # it is gone
        if self._oracle is not None:
            self._oracle.hear(events)
            return
        self._publish(worker.number, events)
        if self.kv is not None:
            self.clock.after(self.settings.event_delay, self.kv.hear, worker, events)

    def _kv_events(self, events: list[KvEvent]) -> None:
        assert self.kv is not None
        self._publish(self.kv.number, events)

    def _publish(self, number: int, events: list[KvEvent]) -> None:
        self._sequences[number] += 1
        batch = KvEventBatch("", self._sequences[number], events)
        self._kept[number].append(batch)
        if self.plane is not None:
            blocks = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
            self.plane.kept(blocks * self.settings.block_size)
        self.clock.after(self.settings.event_delay, self._hear, number, batch)

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
            sequence, held = self._sequences[worker], self._holder(worker).held()
            self.clock.after(self.settings.hop, replica.take_snapshot, worker, sequence, held)

    def _tell_loads(self) -> None:
        now = self.clock.now
        waiting = np.array([worker.waiting_for_blocks for worker in self.workers], np.int32)
        rates = {
            "prefill_rate": np.array([worker.prefill_rate.per_second for worker in self.workers]),
            "fetch_rate": np.array([[of.lately(now) for of in one.fetch_rates.values()] for one in self.workers]),
        }
        for replica in self.replicas:
            self.clock.after(self.settings.hop, replica.hear_loads, waiting, rates)
        self.beat()
        if self.ended < len(self._starts):
            self.clock.after(self.settings.load_seconds, self._tell_loads)

    def beat(self) -> None:
        """Workers say what their last events were."""
        self.clock.after(self.settings.event_delay, self._hear_beats, list(self._sequences))

    def _hear_beats(self, sequences: list[int]) -> None:
        for number, sequence in enumerate(sequences):
            self._hear(number, KvEventBatch("", sequence, []))

    def _tick(self) -> None:
        for replica in self.replicas:
            replica.placer.tick(self.clock.now)
            replica.shared.tick(self.clock.now)
            self._tell_others(replica)
        self._call_line()
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


def _roles(settings: Settings) -> list[Role]:
    """Of all slots; empty ones are at the end."""
    prefill, workers = settings.prefill_workers, settings.workers
    aggregated: list[Role] = ["aggregated"]
    roles: list[Role] = ["prefill"] * prefill
    roles += ["decode"] * (workers - prefill) if prefill else aggregated * workers
    return roles + aggregated * (settings.slots - workers)
