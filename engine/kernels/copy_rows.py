"""Copies rows to memory that another process shares, with one launch for all."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS_A_PROGRAM = 1024


@triton.jit
def _copy_rows(source, source_rows, address, rows, source_stride, stride, count, BLOCK: tl.constexpr):
    """One program for BLOCK of the `count` words of a row. Strides in words."""
    row = tl.program_id(0)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < count
    taken = source + tl.load(source_rows + row) * source_stride + words
    place = address.to(tl.pointer_type(source.dtype.element_ty)) + tl.load(rows + row) * stride + words
    tl.store(place, tl.load(taken, mask=inside), mask=inside)


def copy_rows(source: torch.Tensor, source_rows: torch.Tensor, address: int, rows: torch.Tensor, stride: int) -> None:
    """Row `source_rows[i]` of source [., bytes], uint8, to `address + rows[i] * stride`, for all i.

    Rows int64 [n], on the device of source; `stride` in bytes. A row's bytes are contiguous.
    """
    for word in (torch.int64, torch.int32, torch.uint8):
        sizes = source.shape[1], source.stride(0), source.data_ptr(), address, stride
        if all(size % word.itemsize == 0 for size in sizes):
            break
    taken = source.view(word)
    words = taken.shape[1]
    _copy_rows[(len(rows), triton.cdiv(words, _WORDS_A_PROGRAM))](
        taken, source_rows, address, rows, taken.stride(0), stride // word.itemsize, words, _WORDS_A_PROGRAM
    )


def on_device(rows: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int64 on the device, behind what its present stream was given; the CPU does not wait. Rows are alike."""
    return torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
