"""Which worker holds which KV blocks, by chained hash.

A block's hash stands for its whole prefix, so the longest cached prefix of a request on a worker is the number of its
leading hashes that the worker holds. Workers are rows of the fleet's table. Who holds a block is an int with a bit for
each of them. Blocks that became known together share one int, so a chain is followed at the cost of a look-up a block.

When all blocks of a worker go at once, its row gets another bit (`router.row_bits`), and the old one is taken from the
blocks little by little.

Memory: about 200 bytes for a block on one worker (hash, entry here, entry in the worker's own set), about 100 more for
each further worker.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from router.row_bits import RowBits

_FEW = 8  # workers that are rather looked at one by one
_SLICE = 4096  # blocks that are changed at once: some milliseconds


class BlockIndex:
    """Hash to workers and worker to hashes, kept equal."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits = RowBits()
        self._hashes_of: defaultdict[int, set[bytes]] = defaultdict(set)  # by bit
        self._leaving: deque[int] = deque()  # bits that are nobody's any more and still in blocks

    def apply(self, row: int, events: Iterable[KvEvent]) -> None:
        """Books what a worker told."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self._add(self._bits.of(row), block_hashes)
                case BlockRemoved(block_hashes):
                    bit = self._bits.of(row)
                    self._discard(bit, self._hashes_of[bit].intersection(block_hashes))
                case CacheCleared():
                    self.remove(row)

    def replace(self, row: int, hashes: Sequence[bytes]) -> None:
        """Sets all that a worker holds."""
        for _ in self.replacing(row, hashes):
            pass

    def replacing(self, row: int, hashes: Sequence[bytes]) -> Iterator[None]:
        """The same, step by step. What was known before holds up to the end, and for good if that is not waited for."""
        leaving: int | None
        bit = leaving = self._bits.new()
        try:
            for start in range(0, len(hashes), _SLICE):
                self._add(bit, hashes[start : start + _SLICE])
                yield
            leaving = self._bits.give(row, bit)
        finally:
            self._leave(leaving)

    def remove(self, row: int) -> None:
        """Forgets what a worker holds, at once; `sweep` does the work."""
        self._leave(self._bits.end(row))

    def sweep(self) -> bool:
        """Does a part of the work of removals. Whether there is more."""
        if self._leaving:
            bit = self._leaving[0]
            own = self._hashes_of[bit]
            self._discard(bit, [own.pop() for _ in range(min(_SLICE, len(own)))])
            if not own:
                del self._hashes_of[bit]
                self._bits.free(self._leaving.popleft())
        return bool(self._leaving)

    def depths(self, hashes: Sequence[bytes], rows: int) -> NDArray[np.int32]:
        """Leading blocks of the chain that each of the first `rows` workers holds, `[rows]`."""
        return self._bits.by_row(depths(hashes, self._holders.get, self._bits.size), rows)

    def holders(self, block_hash: bytes) -> set[int]:
        """Workers that hold a block."""
        return self._bits.rows(list(bits(self._holders.get(block_hash, 0))))

    def num_blocks(self, row: int) -> int:
        """Blocks known of a worker."""
        bit = self._bits.get(row)
        return 0 if bit is None else len(self._hashes_of[bit])

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether anybody holds a block."""
        return block_hash in self._holders

    def __len__(self) -> int:
        """Hashes known of anybody, and those that a removal has still to take away."""
        return len(self._holders)

    def _leave(self, bit: int | None) -> None:
        if bit is not None:
            self._leaving.append(bit)

    def _add(self, bit: int, hashes: Iterable[bytes]) -> None:
        holders, mask = self._holders, 1 << bit
        self._hashes_of[bit].update(hashes)
        with_it = {0: mask}  # one int for all blocks that had the same holders
        for block_hash in hashes:
            before = holders.get(block_hash, 0)
            after = with_it.get(before)
            if after is None:
                after = with_it[before] = before | mask
            holders[block_hash] = after

    def _discard(self, bit: int, hashes: Iterable[bytes]) -> None:
        """Takes the bit from blocks that have it."""
        holders, mask = self._holders, 1 << bit
        self._hashes_of[bit].difference_update(hashes)
        without = {mask: 0}
        for block_hash in hashes:
            before = holders[block_hash]
            after = without.get(before)
            if after is None:
                after = without[before] = before ^ mask
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
