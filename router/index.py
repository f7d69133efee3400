"""Which worker holds which KV blocks, by chained hash.

A block's hash stands for its whole prefix, so the longest cached prefix of a request on a worker is the number of its
leading hashes that the worker holds. Memory: about 350 bytes for a block on one worker (its key and sets of its own).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from router.expected import ExpectedBlocks


class BlockIndex:
    """Hash to workers and worker to hashes, kept equal."""

    def __init__(self) -> None:
        self._workers_of: defaultdict[bytes, set[str]] = defaultdict(set)
        self._hashes_of: dict[str, set[bytes]] = {}

    def apply(self, worker: str, events: Iterable[KvEvent]) -> None:
        """Books what a worker told."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._add(worker, block_hashes)
                case BlockRemoved(block_hashes):
                    for block_hash in block_hashes:
                        self._discard(worker, block_hash)
                    self._hashes_of.get(worker, set()).difference_update(block_hashes)
                case CacheCleared():
                    self.remove(worker)

    def replace(self, worker: str, hashes: Iterable[bytes]) -> None:
        """Sets all that a worker holds."""
        self.remove(worker)
        self._add(worker, hashes)

    def remove(self, worker: str) -> None:
        """Forgets a worker, in time of its blocks."""
        for block_hash in self._hashes_of.pop(worker, ()):
            self._discard(worker, block_hash)

    def prefixes(self, hashes: Sequence[bytes], workers: Iterable[str]) -> dict[str, int]:
        """Leading blocks of the chain that each worker holds."""
        return _prefixes(hashes, workers, self.holders)

    def prefixes_soon(
        self, hashes: Sequence[bytes], workers: Iterable[str], expected: ExpectedBlocks
    ) -> dict[str, int]:
        """Leading blocks of the chain that each worker holds or is expected to hold."""
        return _prefixes(hashes, workers, self.holders, expected.holders)

    def holders(self, block_hash: bytes) -> Set[str]:
        """Workers that hold a block."""
        return self._workers_of.get(block_hash, frozenset())

    def num_blocks(self, worker: str) -> int:
        """Blocks known of a worker."""
        return len(self._hashes_of.get(worker, ()))

    def __len__(self) -> int:
        """Hashes known of anybody."""
        return len(self._workers_of)

    def _add(self, worker: str, hashes: Iterable[bytes]) -> None:
        own = self._hashes_of.setdefault(worker, set())
        for block_hash in hashes:
            own.add(block_hash)
            self._workers_of[block_hash].add(worker)

    def _discard(self, worker: str, block_hash: bytes) -> None:
        holders = self._workers_of.get(block_hash)
        if holders is not None:
            holders.discard(worker)
            if not holders:
                del self._workers_of[block_hash]


def _prefixes(hashes: Sequence[bytes], workers: Iterable[str], *sources: Callable[[bytes], Set[str]]) -> dict[str, int]:
    """How far each worker follows the chain by any of `sources`. Costs little where no worker falls behind."""
    found: dict[str, int] = {}
    alive = set(workers)
    for depth, block_hash in enumerate(hashes):
        behind: Set[str] = alive
        for source in sources:
            behind = behind - source(block_hash)
            if not behind:
                break
        if behind:
            found |= dict.fromkeys(behind, depth)
            alive -= behind
            if not alive:
                break
    return found | dict.fromkeys(alive, len(hashes))
