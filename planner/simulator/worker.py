"""A mock worker: the engine's blocks, order of prompts and steps, without a model.

Blocks are the engine's own (`BlockPool`, with its KV events), and so is the order in which prompts are computed
(`PromptOrder`). A step with prompts is one event, and so are all steps in which the same sequences decode, until one
ends, needs a block, or a prompt arrives: then the step under way is the last. As in the engine, a prompt takes its
cached prefix when it is admitted; for simplicity it takes all its blocks then, and no later prompt passes it for want
of them. Answers take a block at a time, and when there is none the weakest claim gives its own back.
"""

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prompt_order import WINDOW, PromptOrder
from engine.request import TIERS, KvEvent
from engine.sequence import State
from planner.simulator.clock import Clock
from planner.simulator.job import Job
from planner.simulator.rate import Rate
from planner.simulator.settings import Settings
from planner.window import Role

_ASSUMED = 1000.0  # tokens per second computed, until something is measured


class Pool(BlockPool):
    """The engine's, that tells what it would forget."""

    def next_evicted(self, count: int) -> list[bytes]:
        """Hashes of the blocks that would be handed out next."""
        empty = sum(1 for _ in itertools.takewhile(lambda block: self._hash_of[block] is None, self._free))
        following = itertools.chain(self._spare, itertools.islice(self._free, empty, None))
        found = (self._hash_of[block] for block in itertools.islice(following, max(0, count - empty)))
        return [block_hash for block_hash in found if block_hash is not None]


def untold(worker: "MockWorker", began: float, seconds: float, number: int) -> None:
    """Nobody wants to know of steps."""


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a worker tells what."""

    events: Callable[["MockWorker", list[KvEvent]], None]
    reserved: Callable[[Job], None]  # there is room for KV from elsewhere
    first_token: Callable[[Job], None]
    ended: Callable[[Job], None]
    steps: Callable[["MockWorker", float, float, int], None] = untold  # began then, last so long, and are so many


class MockWorker:
    """One engine. All times are the clock's."""

    def __init__(self, number: int, role: Role, settings: Settings, clock: Clock, told: Told) -> None:
        self.number = number
        self.role = role
        self.offer = settings.offer(role)  # a flip leaves it as it is
        self.block_size = settings.block_size
        self.pool = Pool(self.offer.kv_tokens // self.block_size)
        self.prefill_rate = Rate()
        self.fetch_rates = {tier: Rate() for tier in ("", *TIERS)}  # from other workers, and tiers of the KV service
        self.computed_tokens = 0  # of prompts, in all
        self.running_seconds = 0.0  # sequences running, summed over time
        self.preempted = 0
        self.link_free_at = 0.0  # on which it sends
        self.restores_free_at = 0.0  # its own way from the KV service's memory
        self.waiting: list[Job] = []  # by arrival
        self.prompts: list[Job] = []  # admitted, not computed yet
        self.decoding: dict[Job, None] = {}
        self.step_ends = 0.0  # of a step with prompts that is under way
        self.kept_tokens = 0  # KV of `decoding`
        self._settings = settings
        self._clock = clock
        self._told = told
        self._order = PromptOrder(self.pool, settings.max_overtaking)
        self._room: deque[Job] = deque()  # want blocks for KV from elsewhere
        self._reserved = 0
        self._landed: list[Job] = []  # join the decodes when this step is over
        self._steps = 0
        self._milestones: list[tuple[int, int, Job]] = []  # (step after which it ends or needs a block, arrival, job)
        self._turn = 0  # of the event that ends what is under way
        self._phase_began: float | None = None  # of steps without prompts
        self._busy = False
        self._stalled_at = -1  # free blocks when the next prompt found too few: it takes more, or another prompt
        self._stopped = False
        self.turn_to(role)

    def turn_to(self, role: Role) -> None:
        """Has this role from now on, with its cache."""
        self.role = role
        most = self.offer.max_batched_tokens
        self._mixed = min(self._settings.decode_prompt_tokens, most) if role == "decode" else most

    def stop(self) -> None:
        """Does nothing any more, whatever is due or asked."""
        self._stopped = True
        self._turn += 1

    @property
    def waiting_for_blocks(self) -> int:
        """Requests that found no room for their KV."""
        return len(self._room)

    def steps_left(self, job: Job) -> int:
        """Until a job that decodes has ended."""
        return job.output_tokens - job.num_output_tokens - (self._steps - job.joined_at)

    def produced(self, job: Job) -> int:
        """Tokens of its answer so far."""
        if job not in self.decoding:
            return job.num_output_tokens
        steps = self._steps - job.joined_at
        if self._phase_began is not None:  # but for the one that is under way
            steps += self._steps_begun() - 1
        return job.num_output_tokens + steps

    def abort(self, job: Job) -> None:
        """Gives up a job, in whatever state it is."""
        self._wake()  # decodes under way end first, as the next milestone may be this job's
        if job in self.decoding:
            self._take_out(job)
        elif job in self.prompts:
            self.prompts.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        elif job in self._landed:
            self._landed.remove(job)
        elif job in self._room:
            self._room.remove(job)
        elif job.state is State.RESERVED:
            self._reserved -= 1
        self.release(job)

    def held(self) -> dict[str, list[bytes]]:
        """All blocks that can be found here, in no tier."""
        return {"": self.pool.hashes()}

    def leading(self, hashes: list[bytes]) -> int:
        """How many leading blocks it has."""
        return self.pool.match(hashes)

    def computing_seconds(self, tokens: int) -> float:
        """How long it would take to compute so many tokens of a prompt, as far as it knows."""
        rate = self.prefill_rate.per_second
        return tokens / (_ASSUMED if math.isnan(rate) else rate)

    def submit(self, job: Job) -> None:
        """A prompt to compute. One that was given up while its prefix was fetched is none."""
        if job.state is State.FINISHED:
            return
        self._wait(job)
        self._wake()

    def reserve(self, job: Job) -> None:
        """Blocks for a prompt that is computed elsewhere; `Told.reserved` when there are."""
        self._room.append(job)
        if self._busy and self.offer.timing.reserve_waits:
            self._wake()
        else:
            self._fill_room()

    def commit(self, job: Job) -> None:
        """The KV of a reserved job has landed, and its first token is known."""
        self._reserved -= 1
        job.num_computed_tokens = job.num_tokens
        job.num_output_tokens += 1
        self._publish(job)
        if job.num_output_tokens >= job.output_tokens:
            self._end(job)
            self._fill_room()
        else:
            self._landed.append(job)
        self._tell()
        self._wake()

    def release(self, job: Job) -> None:
        """The blocks of a held job are wherever they had to go."""
        self._free(job)
        job.state = State.FINISHED
        self._fill_room()
        self._wake()

    def give_back(self, blocks: list[int], *, copied: bool = False) -> None:
        """These were read. `copied`: another worker has them now."""
        self.pool.release(blocks, copied=copied)
        self._fill_room()
        self._wake()

    def store(self, hashes: list[bytes]) -> int:
        """Blocks that came from another worker, behind what is cached; how many are new, 0 if there is no room."""
        cached = self.pool.acquire(hashes)
        missing = hashes[len(cached) :]
        if self.pool.num_free - len(self.prompts) - len(self.decoding) < len(missing):
            missing = []
        blocks = self.pool.allocate(len(missing))
        self.pool.publish(blocks, missing)
        self.pool.release(cached + blocks)
        self._tell()
        return len(missing)

    # Steps

    def _wake(self) -> None:
        """Something has come: begins a step, or lets the decodes under way end with the step that they are in."""
        if not self._busy:
            self._begin()
        elif self._phase_began is not None:
            timing, running = self.offer.timing, len(self.decoding)
            steps = self._steps_begun()
            if steps < self._milestones[0][0] - self._steps:
                self._end_at(self._phase_began, timing.decodes(steps, running, self.kept_tokens), steps, {})
            self._phase_began = None

    def _steps_begun(self) -> int:
        """Of those without prompts that are under way."""
        assert self._phase_began is not None
        seconds = self._clock.now - self._phase_began
        return self.offer.timing.steps_within(seconds, len(self.decoding), self.kept_tokens)

    def _begin(self) -> None:
        if self._stopped:
            return
        for job in self._landed:
            self._join(job)
        self._landed.clear()
        chunks = self._chunks()
        self._tell()
        running, now, timing = len(self.decoding), self._clock.now, self.offer.timing
        self._busy, self._phase_began = bool(chunks or running), None
        if chunks:
            tokens = sum(chunks.values())
            products = sum(n * (job.num_computed_tokens + n / 2) for job, n in chunks.items())
            seconds = timing.mixed(tokens, products, running, self.kept_tokens)
            self.prefill_rate.add(tokens, seconds, now)
            self.step_ends = now + seconds
            self._end_at(now, seconds, 1, chunks)
        elif running:
            steps = self._milestones[0][0] - self._steps
            self._end_at(now, timing.decodes(steps, running, self.kept_tokens), steps, {})
            self._phase_began = now

    def _end_at(self, began: float, seconds: float, steps: int, chunks: dict[Job, int]) -> None:
        self._turn += 1
        self._told.steps(self, began, seconds, steps)
        self._clock.at(began + seconds, self._ended, self._turn, seconds, steps, chunks)

    def _ended(self, turn: int, seconds: float, steps: int, chunks: dict[Job, int]) -> None:
        """So many steps are over, which took so long."""
        if turn != self._turn:
            return  # they ended earlier
        self.running_seconds += seconds * (len(self.decoding) + len(self.prompts))
        self._steps += steps
        self.kept_tokens += steps * len(self.decoding)
        for job, tokens in chunks.items():
            if job.state is State.FINISHED:
                continue  # given up meanwhile
            job.num_computed_tokens += tokens
            self.computed_tokens += tokens
            self._publish(job)
            if not job.num_uncomputed_tokens:
                self.prompts.remove(job)
                self._computed(job)
        while self._milestones and self._milestones[0][0] <= self._steps:
            self._reached(heapq.heappop(self._milestones)[2])
        self._fill_room()
        self._begin()

    def _chunks(self) -> dict[Job, int]:
        """Prompt tokens of the next step."""
        if not self.prompts and (not self.waiting or self.pool.num_free <= self._stalled_at):
            return {}
        offer, chunks = self.offer, dict[Job, int]()
        budget = offer.max_batched_tokens - len(self.decoding)
        if self.decoding:
            budget = min(budget, self._mixed)
        candidates = [*self.waiting[:WINDOW], *self.prompts]
        room = offer.max_running - self._reserved
        for job in self._order.sort(candidates) if len(candidates) > 1 else candidates:
            if budget < 1:
                break
            if job.state is State.WAITING and not (len(self.prompts) + len(self.decoding) < room and self._admit(job)):
                room = 0
                continue
            chunks[job] = min(job.num_uncomputed_tokens, budget)
            budget -= chunks[job]
        if len(candidates) > 1:
            self._order.book(candidates, chunks)
        self._stalled_at = -1 if chunks else self.pool.num_free
        return chunks

    def _computed(self, job: Job) -> None:
        """A whole prompt is, and a token is sampled."""
        job.num_output_tokens += 1
        if job.num_output_tokens == 1:
            self._told.first_token(job)
        if job.hold:
            job.state = State.HELD
        elif job.num_output_tokens >= job.output_tokens:
            self._end(job)
        else:
            self._join(job)

    # Decodes

    def _join(self, job: Job) -> None:
        job.state = State.RUNNING
        self.decoding[job] = None
        self.kept_tokens += job.num_computed_tokens
        self._plan(job)

    def _plan(self, job: Job) -> None:
        """The next milestone of a job that decodes: it ends, or its blocks are full."""
        job.joined_at = self._steps
        left = job.output_tokens - job.num_output_tokens
        space = len(job.block_ids) * self.block_size - job.num_computed_tokens
        if space or self._grow(job):
            space = space or self.block_size
            heapq.heappush(self._milestones, (self._steps + min(left, space), job.arrival, job))

    def _reached(self, job: Job) -> None:
        self._settle(job)
        self._publish(job)
        if job.num_output_tokens >= job.output_tokens:
            del self.decoding[job]
            self.kept_tokens -= job.num_computed_tokens
            self._end(job)
        else:
            self._plan(job)

    def _settle(self, job: Job) -> None:
        done = self._steps - job.joined_at
        job.num_output_tokens += done
        job.num_computed_tokens += done
        job.joined_at = self._steps

    def _grow(self, job: Job) -> bool:
        """One block more. False: the job itself had to give way."""
        while not self.pool.num_free:
            weakest = max((*self.decoding, *self.prompts), key=lambda one: one.arrival)
            self._preempt(weakest)
            if weakest is job:
                return False
        job.block_ids += self.pool.allocate(1)
        return True

    def _preempt(self, job: Job) -> None:
        self.preempted += 1
        if job in self.decoding:
            self._take_out(job)
        else:
            self.prompts.remove(job)
        self._free(job)
        self._wait(job)

    def _take_out(self, job: Job) -> None:
        self._settle(job)
        del self.decoding[job]
        self.kept_tokens -= job.num_computed_tokens
        self._milestones = [milestone for milestone in self._milestones if milestone[2] is not job]
        heapq.heapify(self._milestones)

    def _wait(self, job: Job) -> None:
        job.state = State.WAITING
        bisect.insort(self.waiting, job, key=lambda one: one.arrival)
        self._stalled_at = -1

    # Blocks

    def _admit(self, job: Job) -> bool:
        if not self._take(job):
            return False
        self.waiting.remove(job)
        job.state = State.RUNNING
        job.num_computed_tokens = job.num_published * self.block_size
        self.prompts.append(job)
        return True

    def _take(self, job: Job) -> bool:
        """The cached prefix and blocks for the rest. False: there are not enough."""
        hashes = job.hashes[: job.num_cacheable_blocks]
        cached = self.pool.match(hashes)
        needed = -(-job.num_tokens // self.block_size) - cached
        spare = self.pool.num_free - self.pool.num_idle(hashes[:cached]) - len(self.prompts) - len(self.decoding)
        if spare < needed:
            return False
        job.block_ids = self.pool.acquire(hashes[:cached]) + self.pool.allocate(needed)
        job.num_published = cached
        if job.num_cached_tokens is None:
            job.num_cached_tokens = min(cached * self.block_size, job.prompt_tokens)
        return True

    def _fill_room(self) -> None:
        """Nobody passes one that waits for room."""
        while self._room and self._take(self._room[0]):
            job = self._room.popleft()
            job.state = State.RESERVED
            self._reserved += 1
            self._tell()
            self._told.reserved(job)

    def _publish(self, job: Job) -> None:
        full = job.num_computed_tokens // self.block_size
        if full > job.num_published:
            self.pool.publish(job.block_ids[job.num_published : full], job.hashes[job.num_published : full])
            job.num_published = full

    def _free(self, job: Job) -> None:
        self.pool.release(job.block_ids)
        job.block_ids = []
        job.num_published = job.num_computed_tokens = 0

    def _end(self, job: Job) -> None:
        self._free(job)
        job.state = State.FINISHED
        self._told.ended(job)

    def _tell(self) -> None:
        if events := self.pool.drain_events():
            self._told.events(self, events)
