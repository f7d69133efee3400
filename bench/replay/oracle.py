"""What a router could do that sees every cache and queue as they are: the placement with the best first token now.

It is greedy, looks one request ahead, and knows nothing of what comes later: no bound, but what perfect knowledge of
the present is worth. It costs a loop over all workers and is no policy.
"""

from bench.replay.job import BLOCK_SIZE, Job
from bench.replay.replica import Placement
from bench.replay.settings import Settings
from bench.replay.traces import Demand
from bench.replay.worker import MockWorker
from engine.sequence import State


class Oracle:
    """Places by simulated time to the first token; of equals by load, then by work done so far."""

    def __init__(self, workers: list[MockWorker], settings: Settings) -> None:
        self._settings = settings
        self._prefilling = [worker for worker in workers if worker.role != "decode"]
        self._decoding = [worker for worker in workers if worker.role != "prefill"]

    def place(self, number: int, demand: Demand, now: float) -> Placement:
        """The best worker for the prompt, and for the answer the one with the most room."""
        hashes = demand.hashes[: (demand.prompt_tokens - 1) // BLOCK_SIZE]
        cached = [worker.pool.match(hashes) for worker in self._prefilling]
        longest = max(cached)
        source = self._prefilling[cached.index(longest)]
        best = None
        for worker, blocks in zip(self._prefilling, cached, strict=True):
            options: list[tuple[float, int | None]] = [(self._first_token(worker, demand, hashes, blocks, now), None)]
            fetched = (longest - blocks) * BLOCK_SIZE
            if self._settings.fetch_tokens and fetched >= self._settings.fetch_tokens:
                seconds = max(0.0, source.link_free_at - now) + self._settings.timing.transfer(fetched)
                options.append((seconds + self._first_token(worker, demand, hashes, longest, now), source.number))
            for seconds, where in options:
                rank = (round(seconds, 4), worker.kept_tokens, worker.computed_tokens)
                if best is None or rank < best[0]:
                    best = rank, worker, where
        assert best is not None
        _, worker, where = best
        if worker.role == "aggregated":
            return Placement(worker.number, None, where)
        decode = min(self._decoding, key=lambda one: (_wait_for_blocks(one, demand), _pace(one), -one.pool.num_free))
        return Placement(decode.number, worker.number, where)

    def release(self, number: int, now: float) -> None:
        """Nothing is booked."""

    def _first_token(self, worker: MockWorker, demand: Demand, hashes: list[bytes], cached: int, now: float) -> float:
        """Seconds from now, if nobody comes later."""
        timing, settings = self._settings.timing, self._settings
        own = demand.prompt_tokens - cached * BLOCK_SIZE
        rank = settings.max_overtaking * own
        tokens, products = own, own * (demand.prompt_tokens - own / 2)
        for job in (*worker.prompts, *worker.waiting):
            left = _left(job)
            if settings.max_overtaking * left - job.overtaken_tokens <= rank or not settings.max_overtaking:
                tokens += left
                products += left * (job.num_tokens - left / 2)
        steps = -(-tokens // settings.max_batched_tokens)
        decodes = timing.sequence * len(worker.decoding) + timing.kept_token * worker.kept_tokens
        seconds = timing.mixed(tokens, products, 0, 0.0) + steps * decodes
        seconds += max(0.0, worker.step_ends - now)
        needed = -(-demand.prompt_tokens // BLOCK_SIZE) - worker.pool.match(hashes)
        return seconds + _wait_for_free(worker, needed) * (timing.step + decodes)


def _left(job: Job) -> int:
    """Tokens to compute."""
    if job.state is State.WAITING:
        return job.num_tokens - job.found_blocks * BLOCK_SIZE
    return job.num_uncomputed_tokens


def _wait_for_free(worker: MockWorker, needed: int) -> int:
    """Steps until so many blocks are free, from the answers that end."""
    needed -= worker.pool.num_free
    if needed <= 0:
        return 0
    ends = sorted((worker.steps_left(job), len(job.block_ids)) for job in worker.decoding)
    for steps, blocks in ends:
        needed -= blocks
        if needed <= 0:
            return steps
    return ends[-1][0] if ends else 0


def _wait_for_blocks(worker: MockWorker, demand: Demand) -> tuple[int, int]:
    """Requests before this one that wait for room, and steps until there is some."""
    return worker.waiting_for_blocks, _wait_for_free(worker, -(-demand.prompt_tokens // BLOCK_SIZE))


def _pace(worker: MockWorker) -> int:
    return worker.kept_tokens
