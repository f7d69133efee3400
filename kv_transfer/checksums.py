"""Checksums of pages, by which a receiver knows that what landed is what was sent."""

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, as int64, and its multiples lie far apart
_WORD = 8  # bytes
_making = threading.Lock()  # over the streams, as any thread takes sums
_streams: dict[torch.device, torch.cuda.Stream] = {}


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
    """A 64-bit sum of each of these rows of `pages` [., ...], a row being contiguous bytes; alike on all devices.

    The sum of a row's words, each times an odd number of its own, modulo 2**64: any change of one word changes it. A
    CUDA device takes it where the pages lie, as it would take longer to hand the bytes over than to move them.
    """
    if pages.is_cpu:
        return [_sum_of(pages[row].view(torch.uint8).numpy().reshape(-1)) for row in rows]
    from engine.kernels.copy_rows import on_device
    from engine.kernels.row_sums import row_sums

    if not rows:
        return []
    with torch.cuda.device(pages.device), beside_steps(pages.device):
        words = pages.view(torch.uint8).flatten(1)
        if words.shape[1] % _WORD == 0:
            words = words.view(torch.int64)
        sums: list[int] = row_sums(words, on_device(list(rows), pages.device), _FACTOR).tolist()
    return [value % 2**64 for value in sums]


def _sum_of(row: npt.NDArray[np.uint8]) -> int:
    words = row.view(np.uint64) if len(row) % _WORD == 0 else row.astype(np.uint64)
    return int(np.dot(words, _factors_of(len(words))))


@lru_cache(maxsize=4)
def _factors_of(count: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, 2 * count, 2, dtype=np.uint64) * np.uint64(_FACTOR % 2**64)
