"""Blocks that requests just placed will leave on their workers.

Workers tell of a block when it is computed. Until then a burst of requests with one prefix would be spread over all
workers; so what a placement will bring attracts others like it for a short time. It is kept apart from what workers
told, which alone is true.

Chains are taken in whole from their root, so on a worker that expects a block all blocks before it are expected, too.
They are forgotten by the generation: each block is in the young or in the old one, and the old one ends as a whole.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from router.index import depths
from router.row_bits import RowBits

_LIFETIME = 5.0  # seconds
_MAX_BLOCKS = 1 << 18  # about 40 MB


class ExpectedBlocks:
    """Each lasts for `lifetime` seconds to twice that; sooner, if there are more than `max_blocks` distinct ones."""

    def __init__(self, lifetime: float = _LIFETIME, max_blocks: int = _MAX_BLOCKS) -> None:
        self._lifetime = lifetime
        self._size = max_blocks // 2  # of a generation
        self._bits = RowBits()
        self._young: dict[bytes, int] = {}  # workers, a bit for each
        self._old: dict[bytes, int] = {}
        self._born = 0.0
        self._ended_young: list[int] = []  # bits of workers that are gone, in blocks of the young generation still
        self._ended_old: list[int] = []  # in those of the old one only

    def expect(self, rows: Iterable[int], hashes: Sequence[bytes], now: float) -> None:
        """These workers will soon hold `hashes`. `now`: monotonic seconds."""
        hashes = hashes[: self._size]
        self.expire(now)
        mask = 0
        for row in rows:
            mask |= 1 << self._bits.of(row)
        young = self._young
        start = _leading(hashes, lambda block_hash: young.get(block_hash, 0) & mask == mask)
        if len(young) + len(hashes) - start > self._size:
            self._turn(now)
            young, start = self._young, 0
        new = _leading(hashes, young.__contains__)
        with_it: dict[int, int] = {}
        for block_hash in hashes[start:new]:
            before = young[block_hash]
            after = with_it.get(before)
            if after is None:
                after = with_it[before] = before | mask
            young[block_hash] = after
        young.update(dict.fromkeys(hashes[new:], mask))

    def expire(self, now: float) -> None:
        """Ends what is over."""
        age = now - self._born
        if age >= 2 * self._lifetime:
            self._turn(now)
            self._turn(now)
        elif age >= self._lifetime:
            self._turn(self._born + self._lifetime)

    def remove(self, row: int) -> None:
        """Ends all expectations of a worker that is gone."""
        bit = self._bits.end(row)
        if bit is not None:
            self._ended_young.append(bit)

    def depths(self, hashes: Sequence[bytes], rows: int) -> NDArray[np.int32]:
        """Leading blocks of the chain that each of the first `rows` workers will hold, `[rows]`."""
        young = depths(hashes, self._young.get, self._bits.size)
        both = np.maximum(young, depths(hashes, self._old.get, self._bits.size)) if self._old else young
        return self._bits.by_row(both, rows)

    def __len__(self) -> int:
        """Distinct blocks expected, also of workers that have left since."""
        return len(self._young.keys() | self._old.keys())

    def _turn(self, born: float) -> None:
        self._young, self._old, self._born = {}, self._young, born
        for bit in self._ended_old:
            self._bits.free(bit)
        self._ended_young, self._ended_old = [], self._ended_young


def _leading(hashes: Sequence[bytes], holds: Callable[[bytes], bool]) -> int:
    """How many leading hashes it holds for: of none behind the first for which it does not."""
    return bisect_left(hashes, True, key=lambda block_hash: not holds(block_hash))
