"""Checksums of pages, by which a receiver knows that what landed is what was sent."""

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import xxhash

_FACTOR = 0x9E3779B97F4A7C15  # odd, and its multiples lie far apart
_AT_ONCE = 16  # pages
# Over the two below, as any thread takes sums: all of them on one stream for each device, behind that device's factors.
_making = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
_factors_of: dict[tuple[int, torch.device], torch.Tensor] = {}


def beside_steps(device: torch.device) -> AbstractContextManager[object]:
    """What is done inside, to pages that are complete already, runs beside the engine's steps and in order with sums.

    Pages that are made only for their sums have to be made inside: on a CUDA device nothing else orders the two.
    """
    if device.type == "cpu":
        return contextlib.nullcontext()
    with _making:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(_streams[device])


def page_sums(pages: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """A 64-bit sum of each of these rows of `pages` [., ...], a row being contiguous bytes.

    On CPU xxh3_64. On a CUDA device, which would take longer to hand the bytes over than to move them to the peer: the
    sum of a row's words, each times an odd number of its own, modulo 2**64. Any change of one word changes it.
    """
    if pages.is_cpu:
        return [xxhash.xxh3_64_intdigest(pages[row].view(torch.uint8).numpy().data) for row in rows]
    sums: list[int] = []
    with beside_steps(pages.device):
        words = pages.view(torch.uint8).flatten(1)
        if words.shape[1] % 8 == 0:
            words = words.view(torch.int64)
        factors = _factors(words.shape[1], pages.device)
        for start in range(0, len(rows), _AT_ONCE):
            index = torch.tensor(list(rows[start : start + _AT_ONCE]), device=pages.device)
            sums += (words[index].long() * factors).sum(1).tolist()
    return [value % 2**64 for value in sums]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """int64 [count], made on the stream of the sums."""
    with _making:
        if (count, device) not in _factors_of:
            odd = torch.arange(1, 2 * count, 2, device=device)
            _factors_of[count, device] = odd * (_FACTOR - 2**64)  # as int64, which wraps
        return _factors_of[count, device]
