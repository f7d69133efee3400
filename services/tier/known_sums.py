"""Sums of the pages that are kept, as they were when they came: what is sent is judged by them, and not read for it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kv_transfer.checksums import page_sums
from kv_transfer.references import BlockRef

_THREADS = 4


class KnownSums:
    """In place of `page_sums` for pages that are held. `generation` gives a page's present one. Any thread may call it.

    So bytes that change while they are kept are damage to whoever gets them.
    """

    def __init__(self, generation: Callable[[int], int]) -> None:
        self._generation = generation
        self._threads = ThreadPoolExecutor(_THREADS, "sums")  # somebody waits for what has to be read
        self._of: dict[int, tuple[int, int]] = {}  # generation and sum, by page

    def landed(self, blocks: Sequence[BlockRef], sums: Sequence[int]) -> None:
        """These came, and were what their sender meant."""
        for ref, value in zip(blocks, sums, strict=True):
            self._of[ref.block_id] = ref.generation, value

    def __call__(self, pages: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """See `page_sums`. What came from a store is read."""
        held = {row: self._generation(row) for row in rows}
        unknown = [row for row, generation in held.items() if self._of.get(row, (-1, 0))[0] != generation]
        found = self._threads.map(lambda row: page_sums(pages, [row])[0], unknown)
        for row, value in zip(unknown, found, strict=True):
            self._of[row] = held[row], value
        return [self._of[row][1] for row in rows]
