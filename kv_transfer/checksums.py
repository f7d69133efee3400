"""Checksums of pages, by which a receiver knows that what landed is what was sent."""

from collections.abc import Sequence
from functools import cache

import torch
import xxhash

_FACTOR = 0x9E3779B97F4A7C15  # odd, and its multiples lie far apart
_AT_ONCE = 16  # pages


def page_sums(pages: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """A 64-bit sum of each of these rows of `pages` [., ...], a row being contiguous bytes.

    On CPU xxh3_64. On a CUDA device, which would take longer to hand the bytes over than to move them to the peer: the
    sum of a row's words, each times an odd number of its own, modulo 2**64. Any change of one word changes it.
    """
    if pages.is_cpu:
        return [xxhash.xxh3_64_intdigest(pages[row].view(torch.uint8).numpy().data) for row in rows]
    sums: list[int] = []
    with torch.cuda.stream(_stream(pages.device)):  # beside the steps of the engine
        words = pages.view(torch.uint8).flatten(1)
        words = words.view(torch.int64) if words.shape[1] % 8 == 0 else words.long()
        factors = _factors(words.shape[1], pages.device)
        for start in range(0, len(rows), _AT_ONCE):
            index = torch.tensor(list(rows[start : start + _AT_ONCE]), device=pages.device)
            sums += (words[index] * factors).sum(1).tolist()
    return [value % 2**64 for value in sums]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _factors(count: int, device: torch.device) -> torch.Tensor:
    odd = torch.arange(1, 2 * count, 2, device=device)
    return odd * (_FACTOR - 2**64)  # as int64, which wraps
