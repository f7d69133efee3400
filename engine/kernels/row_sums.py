"""Sums of rows, each word times an odd number of its own, in one reading of the memory."""

import torch
import triton
import triton.language as tl

_WORDS_A_PROGRAM = 4096


@triton.jit
def _row_sums(words, rows, sums, stride, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK of the `count` words of a row; sums [rows, programs of a row]."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = part * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(words + tl.load(rows + row) * stride + place, mask=place < count, other=0).to(tl.int64)
    factors = (2 * place.to(tl.int64) + 1) * FACTOR
    tl.store(sums + row * tl.num_programs(1) + part, tl.sum(found * factors))


def row_sums(words: torch.Tensor, rows: torch.Tensor, factor: int) -> torch.Tensor:
    """int64 [n]: for each of `rows`, int64 [n], the sum of `words[row, i] * (2 * i + 1) * factor`, modulo 2**64.

    Words [., count] of any integer type, contiguous in a row; `factor` as int64.
    """
    count = words.shape[1]
    parts = triton.cdiv(count, _WORDS_A_PROGRAM)
    sums = torch.empty(len(rows), parts, dtype=torch.int64, device=words.device)
    _row_sums[(len(rows), parts)](words, rows, sums, words.stride(0), count, factor, _WORDS_A_PROGRAM)
    return sums.sum(1)
