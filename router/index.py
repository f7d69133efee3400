"""Which worker holds which KV blocks, by chained hash.

A block's hash stands for its whole prefix, so the longest cached prefix of a request on a worker is the number of its
leading hashes that the worker holds. Workers are rows of the fleet's table; who holds a block is an int with a bit for
each of them. Blocks that became known together share one int, so a chain is followed at the cost of a look-up a block.

Memory: about 200 bytes for a block on one worker (hash, entry here, entry in the worker's own set), about 100 more for
each further worker.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent

_FEW = 8  # workers that are rather looked at one by one


class BlockIndex:
    """Hash to workers and worker to hashes, kept equal."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._hashes_of: defaultdict[int, set[bytes]] = defaultdict(set)

    def apply(self, row: int, events: Iterable[KvEvent]) -> None:
        """Books what a worker told."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._add(row, block_hashes)
                case BlockRemoved(block_hashes):
                    own = self._hashes_of[row]
                    removed = own.intersection(block_hashes)
                    own -= removed
                    self._discard(row, removed)
                case CacheCleared():
                    self.remove(row)

    def replace(self, row: int, hashes: Iterable[bytes]) -> None:
        """Sets all that a worker holds."""
        self.remove(row)
        self._add(row, hashes)

    def remove(self, row: int) -> None:
        """Forgets a worker, in time of its blocks."""
        self._discard(row, self._hashes_of.pop(row, ()))

    def depths(self, hashes: Sequence[bytes], rows: int) -> NDArray[np.int32]:
        """Leading blocks of the chain that each of the first `rows` workers holds, `[rows]`."""
        return depths(hashes, self._holders.get, rows)

    def holders(self, block_hash: bytes) -> set[int]:
        """Workers that hold a block."""
        return set(bits(self._holders.get(block_hash, 0)))

    def num_blocks(self, row: int) -> int:
        """Blocks known of a worker."""
        return len(self._hashes_of.get(row, ()))

    def __len__(self) -> int:
        """Hashes known of anybody."""
        return len(self._holders)

    def _add(self, row: int, hashes: Iterable[bytes]) -> None:
        holders, own, bit = self._holders, self._hashes_of[row], 1 << row
        own.update(hashes)
        with_it = {0: bit}  # one int for all blocks that had the same holders
        for block_hash in hashes:
            before = holders.get(block_hash, 0)
            after = with_it.get(before)
            if after is None:
                after = with_it[before] = before | bit
            holders[block_hash] = after

    def _discard(self, row: int, hashes: Iterable[bytes]) -> None:
        """Takes the worker's bit from blocks that have it."""
        holders, bit = self._holders, 1 << row
        without = {bit: 0}
        for block_hash in hashes:
            before = holders[block_hash]
            after = without.get(before)
            if after is None:
                after = without[before] = before ^ bit
            if after:
                holders[block_hash] = after
            else:
                del holders[block_hash]


def bits(mask: int) -> Iterable[int]:
    """Numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def depths(hashes: Sequence[bytes], holders_of: Callable[[bytes], int | None], rows: int) -> NDArray[np.int32]:
    """How far each worker follows the chain, `[rows]`. Costs little where no worker falls behind."""
    found = np.zeros(rows, np.int32)
    following, last, depth = -1, None, 0
    for depth, holders in enumerate(map(holders_of, hashes)):
        if holders is last and holders is not None:
            continue
        still = following & (holders or 0)
        if still != following and depth:
            _set(found, following ^ still, depth)
        following, last = still, holders
        if not following:
            return found
    if hashes:
        _set(found, following, depth + 1)
    return found


def _set(found: NDArray[np.int32], mask: int, depth: int) -> None:
    if mask.bit_count() <= _FEW:
        for row in bits(mask):
            found[row] = depth
    else:
        data = np.frombuffer(mask.to_bytes((len(found) + 7) // 8, "little"), np.uint8)
        found[np.unpackbits(data, count=len(found), bitorder="little").view(np.bool_)] = depth
