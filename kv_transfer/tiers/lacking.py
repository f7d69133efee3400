"""Which blocks the KV service is to copy from workers next: those that it lacks, oldest first."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

_TRIES = 3  # of a block whose copy fails


class Lacking:
    """Blocks by hash, each with a worker that has it. Of several the one of the lowest `rank`.

    At most `limit`: then the oldest are given up, as whoever has them may have others in their place soon.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._workers: dict[str, int] = {}  # to their ranks
        self._queue: OrderedDict[bytes, str] = OrderedDict()
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # the same by worker
        self._cached: dict[str, set[bytes]] = {}  # all that workers have, lacking or not
        self._held: set[bytes] = set()  # here, or on the way
        self._tries: Counter[bytes] = Counter()  # that failed
        self.given_up = 0  # blocks for which there was no place in the queue

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, worker: str, rank: int) -> None:
        """What this worker has may be copied."""
        self._workers[worker] = rank
        self._of.setdefault(worker, OrderedDict())
        self._cached.setdefault(worker, set())

    def leave(self, worker: str) -> None:
        """It may not any more."""
        self.clear(worker)
        self._workers.pop(worker, None)
        self._of.pop(worker, None)
        self._cached.pop(worker, None)

    def stored(self, worker: str, hashes: Sequence[bytes]) -> None:
        """The worker has these blocks now, parents first."""
        self._cached[worker].update(hashes)
        rank = self._workers[worker]
        for block_hash in hashes:
            if block_hash in self._held:
                continue
            other = self._queue.get(block_hash)
            if other is None or self._workers[other] > rank:
                self._put(block_hash, worker)
        while len(self._queue) > self._limit:
            oldest = next(iter(self._queue))
            self._take_out(oldest)
            self._tries.pop(oldest, None)
            self.given_up += 1

    def wanted(self, hashes: Sequence[bytes]) -> None:
        """These are to be copied from who has them, also those that were here once and are not any more."""
        for worker, cached in self._cached.items():
            self.stored(worker, [each for each in hashes if each in cached])

    def removed(self, worker: str, hashes: Iterable[bytes]) -> None:
        """The worker has these blocks no more."""
        self._cached.get(worker, set()).difference_update(hashes)
        for block_hash in hashes:
            if self._queue.get(block_hash) == worker:
                self._take_out(block_hash)
                self._tries.pop(block_hash, None)

    def clear(self, worker: str) -> None:
        """The worker has nothing any more."""
        self.removed(worker, list(self._of.get(worker, ())))
        self._cached.get(worker, set()).clear()

    def kept(self, hashes: Iterable[bytes]) -> None:
        """These blocks are here."""
        self._held.update(hashes)
        for block_hash in hashes:
            self._take_out(block_hash)
            self._tries.pop(block_hash, None)

    def lost(self, hashes: Iterable[bytes]) -> None:
        """These blocks are not here, or did not come. They are wanted again when a worker says that it has them.

        Or by `wanted`: else whoever drops or drives out what a worker has would have it back at once.
        """
        self._held.difference_update(hashes)

    def take(self, count: int, worker: str = "") -> tuple[str, list[bytes]] | None:
        """A worker and up to `count` blocks to be copied from it, which count as kept from now on; None: none.

        Of `worker`; without that, of whoever has the oldest.
        """
        worker = worker or next(iter(self._queue.values()), "")
        hashes = list(islice(self._of.get(worker, ()), count))
        self._held.update(hashes)
        for block_hash in hashes:
            self._take_out(block_hash)
        return (worker, hashes) if hashes else None

    def waits_for(self, worker: str) -> bool:
        """Whether blocks are to be copied from this worker."""
        return bool(self._of.get(worker))

    def num_held(self, hashes: Iterable[bytes]) -> int:
        """How many of these blocks are here or on the way."""
        return len(self._held.intersection(hashes))

    def failed(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Of what was taken, these did not come, maybe since the worker was busy, maybe as it has the first no more.

        They are tried again, the first one later than the others; returns how many are not.
        """
        self._held.difference_update(hashes)
        if worker not in self._workers:
            return len(hashes)
        for block_hash in reversed(hashes[1:]):
            self._put(block_hash, worker)
            self._queue.move_to_end(block_hash, last=False)
            self._of[worker].move_to_end(block_hash, last=False)
        first = hashes[0]
        self._tries[first] += 1
        if self._tries[first] == _TRIES:
            del self._tries[first]
            return 1
        self._put(first, worker)
        return 0

    def _put(self, block_hash: bytes, worker: str) -> None:
        """Where it was of another worker it keeps its place in the order of all."""
        if (other := self._queue.get(block_hash)) is not None:
            del self._of[other][block_hash]
        self._queue[block_hash] = worker
        self._of[worker][block_hash] = None

    def _take_out(self, block_hash: bytes) -> None:
        if (worker := self._queue.pop(block_hash, None)) is not None:
            del self._of[worker][block_hash]


RANKS: Mapping[str, int] = {"prefill": 0, "aggregated": 1, "decode": 2}  # by role: streams are disturbed last
