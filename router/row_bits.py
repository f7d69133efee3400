"""A bit of large ints for each row of the fleet's table, and another one each time that a row begins anew.

So all that was known of a row ends at once, while its old bit is still in many ints. It is given to a row again only
when it is free of them.
"""

import numpy as np
from numpy.typing import NDArray

_NONE = 0  # of rows without a bit; no int has it


class RowBits:
    """Which bit is whose. `size` bits are in use at most."""

    def __init__(self) -> None:
        self.size = 1
        self._bits: NDArray[np.intp] = np.zeros(16, np.intp)
        self._free: list[int] = []

    def get(self, row: int) -> int | None:
        """The row's bit. None: it has none."""
        return int(self._bits[row]) or None if row < len(self._bits) else None

    def of(self, row: int) -> int:
        """The row's bit, a new one if it has none."""
        bit = self.get(row)
        if bit is None:
            bit = self.new()
            self.give(row, bit)
        return bit

    def new(self) -> int:
        """A bit that no int has, of no row."""
        if self._free:
            return self._free.pop()
        self.size += 1
        return self.size - 1

    def give(self, row: int, bit: int) -> int | None:
        """Gives a row a new bit; returns the old one."""
        old = self.end(row)
        if row >= len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros(row + 1, np.intp)])
        self._bits[row] = bit
        return old

    def end(self, row: int) -> int | None:
        """Takes a row's bit away and returns it, to be freed later."""
        bit = self.get(row)
        if bit is not None:
            self._bits[row] = _NONE
        return bit

    def free(self, bit: int) -> None:
        """No int has it any more."""
        self._free.append(bit)

    def by_row(self, values: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
        """Of `values` of all bits, `[size]`, those of the first `rows` rows."""
        known = values[self._bits[:rows]]
        return known if len(known) == rows else np.concatenate([known, np.zeros(rows - len(known), np.int32)])

    def rows(self, bits: list[int]) -> set[int]:
        """Whose these are."""
        return set(np.flatnonzero(np.isin(self._bits, bits)).tolist())
