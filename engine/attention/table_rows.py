"""Which row of a table of block lists each sequence has, and what is new in it.

For those who keep such a table elsewhere, on a device or in other processes: only what is new has to be sent.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Addition(NamedTuple):
    """Blocks that a row has from place `start` on. From place 0: the row has a new owner."""

    row: int
    start: int
    blocks: list[int]


class TableRows:
    """Gives rows to block lists, by identity: a sequence keeps and extends its list as long as it keeps its blocks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        # List, row and entries told of, the list not asked for longest first.
        self._known: OrderedDict[int, tuple[Sequence[int], int, int]] = OrderedDict()

    def rows_of(self, block_lists: Sequence[Sequence[int]]) -> tuple[list[int], list[Addition]]:
        """Row of each list, and what is new. If there are none left, the lists not asked for longest lose theirs."""
        if len(block_lists) > self._count:
            raise ValueError(f"{len(block_lists)} sequences in a step; the block table has {self._count} rows")
        for blocks in block_lists:
            if id(blocks) in self._known:
                self._known.move_to_end(id(blocks))
        missing = sum(id(blocks) not in self._known for blocks in block_lists)
        while missing > len(self._free):
            self._free.append(self._known.popitem(last=False)[1][1])
        rows: list[int] = []
        additions: list[Addition] = []
        for blocks in block_lists:
            known = self._known.get(id(blocks))
            row, count = (known[1], known[2]) if known is not None else (self._free.pop(), 0)
            if len(blocks) > count:
                additions.append(Addition(row, count, list(blocks[count:])))
                self._known[id(blocks)] = (blocks, row, len(blocks))
            rows.append(row)
        return rows, additions
