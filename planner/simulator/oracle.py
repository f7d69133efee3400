"""What a router could do that sees every cache and queue as they are: the placement that delays first tokens least.

That is this request's time to its first token, what its prompt adds to that of others that wait behind it, and the time
to compute again what its blocks evict, if that is asked for later and no other worker holds it: the one thing that it
knows of the future. It is greedy: no bound, but far more than any router can know. It costs a loop over all workers and
is no policy.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from engine.request import BlockRemoved, BlockStored, KvEvent
from engine.sequence import State
from planner.simulator.demand import Demand
from planner.simulator.job import BLOCK_SIZE, Job
from planner.simulator.replica import Placement
from planner.simulator.settings import Settings
from planner.simulator.worker import MockWorker
from router.fit import Measured


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request on its way to a worker, which does not know of it yet."""

    comes_at: float
    tokens: int  # left to compute
    demand: Demand


class Oracle:
    """Places by seconds added to first tokens; of equals by load, then by work done so far."""

    def __init__(self, workers: list[MockWorker], demands: list[Demand], settings: Settings) -> None:
        self._settings = settings
        self._uses = Counter(each for demand in demands for each in demand.cacheable)  # that are still to come
        self._copies = Counter[bytes]()
        self._sent: defaultdict[int, list[_Sent]] = defaultdict(list)
        self._prefilling = [worker for worker in workers if worker.role != "decode"]
        self._decoding = [worker for worker in workers if worker.role != "prefill"]

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """The best worker for the prompt, and for the answer the one with the most room."""
        hashes = demand.cacheable
        self._uses.subtract(hashes)
        cached = [worker.pool.match(hashes) for worker in self._prefilling]
        longest = max(cached)
        source = self._prefilling[cached.index(longest)]
        best = None
        for worker, blocks in zip(self._prefilling, cached, strict=True):
            options: list[tuple[float, float, int | None]] = [
                (self._delay(worker, demand, hashes, blocks, now), 0.0, None)
            ]
            fetched = (longest - blocks) * BLOCK_SIZE
            if self._settings.fetch_tokens and fetched >= self._settings.fetch_tokens:
                moved = max(0.0, source.link_free_at - now) + source.offer.timing.transfer(fetched)
                options.append((self._delay(worker, demand, hashes, longest, now), moved, source.number))
            lost = self._lost(worker, -(-(demand.prompt_tokens + demand.output_tokens) // BLOCK_SIZE) - blocks)
            for delay, moved, where in options:
                rank = (round(delay + moved + lost, 4), _held(worker), worker.computed_tokens)
                if best is None or rank < best[0]:
                    best = rank, worker, where, moved, longest if where is not None else blocks
        assert best is not None
        _, worker, where, moved, blocks = best
        sent = _Sent(now + 2 * self._settings.hop + moved, demand.prompt_tokens - blocks * BLOCK_SIZE, demand)
        self._sent[worker.number].append(sent)
        if worker.role == "aggregated":
            return Placement(worker.number, None, where)
        needed = -(-demand.prompt_tokens // BLOCK_SIZE)
        decode = min(self._decoding, key=lambda one: (one.waiting_for_blocks, _wait_for_free(one, needed), _held(one)))
        return Placement(decode.number, worker.number, where)

    def release(self, number: int, measured: Measured | None) -> None:
        """Nothing is booked."""

    def hear(self, events: list[KvEvent]) -> None:
        """What a worker stored or removed, at once."""
        for event in events:
            match event:
                case BlockStored(hashes):
                    self._copies.update(hashes)
                case BlockRemoved(hashes):
                    self._copies.subtract(hashes)

    def _lost(self, worker: MockWorker, blocks: int) -> float:
        """Seconds to compute again what so many new blocks evict there, for those who wait there now, too."""
        evicted = worker.pool.next_evicted(blocks)
        again = sum(self._uses[each] > 0 and self._copies[each] < 2 for each in evicted)
        return again * worker.offer.timing.prompt_token * BLOCK_SIZE * (1 + len(worker.prompts) + len(worker.waiting))

    def _delay(self, worker: MockWorker, demand: Demand, hashes: list[bytes], cached: int, now: float) -> float:
        """Seconds until its first token, and those that others get theirs later, if nobody else comes."""
        timing = worker.offer.timing
        sent = self._sent[worker.number] = [one for one in self._sent[worker.number] if one.comes_at > now]
        others = [(_left(job), job.num_tokens, job.overtaken_tokens, not job.block_ids) for job in worker.prompts]
        others += [(_left(job), job.num_tokens, job.overtaken_tokens, True) for job in worker.waiting]
        others += [(one.tokens, one.demand.prompt_tokens, 0, True) for one in sent]
        own = demand.prompt_tokens - cached * BLOCK_SIZE
        tokens, products = own, own * (demand.prompt_tokens - own / 2)
        needed = -(-demand.prompt_tokens // BLOCK_SIZE) - worker.pool.match(hashes)
        alone, behind = timing.mixed(tokens, products, 0, 0.0), 0
        for left, total, overtaken, wants_blocks in others:
            if self._settings.max_overtaking * (left - own) > overtaken:
                behind += 1
                continue
            tokens += left
            products += left * (total - left / 2)
            needed += -(-left // BLOCK_SIZE) if wants_blocks else 0
        steps = -(-tokens // worker.offer.max_batched_tokens)
        decodes = timing.sequence * len(worker.decoding) + timing.kept_token * worker.kept_tokens
        seconds = timing.mixed(tokens, products, 0, 0.0) + steps * decodes + behind * alone
        seconds += max(0.0, worker.step_ends - now)
        return seconds + _wait_for_free(worker, needed) * (timing.step + decodes)


def _left(job: Job) -> int:
    """Tokens to compute."""
    if job.state is State.WAITING:
        return job.num_tokens - job.found_blocks * BLOCK_SIZE
    return job.num_uncomputed_tokens


def _wait_for_free(worker: MockWorker, needed: int) -> float:
    """Steps until so many blocks are free, from the answers that end."""
    needed -= worker.pool.num_free
    if needed <= 0:
        return 0.0
    freed, steps = 0, 0
    for steps, blocks in sorted((worker.steps_left(job), len(job.block_ids)) for job in worker.decoding):
        freed += blocks
        if freed >= needed:
            return steps
    return steps * needed / max(1, freed)  # and those that come after them


def _held(worker: MockWorker) -> int:
    """Blocks of requests under way."""
    return worker.pool.num_blocks - worker.pool.num_free
