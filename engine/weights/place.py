"""Where a tensor of a checkpoint goes: a parameter, or rows of one, that hold all of the tensor or a part of it."""

from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Place:
    """`destination` holds a checkpoint's tensor, or of its dimension `dim` the entries from `start` on.

    A loader gives the tensor in pieces of whole rows, in any order and from several threads. One that stores something
    else than the values, such as quantised ones with their scales, overrides `put`, and `window` to return None.
    """

    destination: torch.Tensor
    dim: int = 0
    start: int = 0
    total: int | None = None  # size of the checkpoint's tensor in `dim`; None: the destination's own

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        shape = list(self.destination.shape)
        if self.total is not None:
            shape[self.dim] = self.total
        return tuple(shape)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """That the tensor in the checkpoint may have."""
        return FLOATS if self.destination.dtype in (*FLOATS, torch.float64) else (self.destination.dtype,)

    @property
    def rows(self) -> range:
        """The rows of the checkpoint's tensor that are wanted."""
        first = self.start if self.dim == 0 else 0
        return range(first, first + len(self.destination))

    def put(self, first: int, values: torch.Tensor) -> None:
        """Stores `values`, the checkpoint's rows from `first` on, on the device of the destination, of any dtype."""
        if self.dim != 0:
            values = values.narrow(self.dim, self.start, self.destination.shape[self.dim])
        self._part(first, len(values)).copy_(values)

    def window(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory of `count` rows from the checkpoint's row `first` on, if bytes of `dtype` can be read into it."""
        part = self._part(first, count)
        whole_rows = self.dim == 0 or self.total is None
        return part if whole_rows and part.is_cpu and part.dtype == dtype and part.is_contiguous() else None

    def _part(self, first: int, count: int) -> torch.Tensor:
        return self.destination.narrow(0, first - self.rows.start, count)
