"""Blocks that a request just placed will leave on its workers.

Workers tell of a block when it is computed. Until then a burst of requests with one prefix would be spread over all
workers; so what a placement will bring attracts others like it for a short time. It is kept apart from what workers
told, which alone is true.
"""

from collections import deque
from collections.abc import Iterable, Sequence, Set

_LIFETIME = 5.0  # seconds
_MAX_BLOCKS = 1 << 18  # about 100 MB


class ExpectedBlocks:
    """Expectations in the order in which they end; at most `max_blocks` of them, the oldest go first."""

    def __init__(self, lifetime: float = _LIFETIME, max_blocks: int = _MAX_BLOCKS) -> None:
        self._lifetime = lifetime
        self._max_blocks = max_blocks
        self._size = 0
        self._queue: deque[tuple[float, str, Sequence[bytes]]] = deque()  # until when, worker, hashes
        self._workers_of: dict[bytes, dict[str, int]] = {}  # how many expectations name a worker

    def expect(self, worker: str, hashes: Sequence[bytes], now: float) -> None:
        """`worker` will soon hold `hashes`. `now`: monotonic seconds."""
        hashes = hashes[: self._max_blocks]
        self._queue.append((now + self._lifetime, worker, hashes))
        self._size += len(hashes)
        for block_hash in hashes:
            counts = self._workers_of.setdefault(block_hash, {})
            counts[worker] = counts.get(worker, 0) + 1
        self.expire(now)

    def expire(self, now: float) -> None:
        """Ends what is over, and what is too much."""
        while self._queue and (self._queue[0][0] <= now or self._size > self._max_blocks):
            _, worker, hashes = self._queue.popleft()
            self._end(worker, hashes)

    def remove(self, worker: str) -> None:
        """Ends all expectations of a worker that is gone."""
        kept: deque[tuple[float, str, Sequence[bytes]]] = deque()
        for entry in self._queue:
            if entry[1] == worker:
                self._end(worker, entry[2])
            else:
                kept.append(entry)
        self._queue = kept

    def holders(self, block_hash: bytes) -> Set[str]:
        """Workers that will hold a block."""
        counts = self._workers_of.get(block_hash)
        return counts.keys() if counts else frozenset()

    def __len__(self) -> int:
        """Distinct blocks expected."""
        return len(self._workers_of)

    def _end(self, worker: str, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._size -= 1
            counts = self._workers_of[block_hash]
            counts[worker] -= 1
            if not counts[worker]:
                del counts[worker]
                if not counts:
                    del self._workers_of[block_hash]
