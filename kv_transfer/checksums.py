"""Checksums of pages, by which a receiver knows that what landed is what was sent."""

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import xxhash

_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, as int64, and its multiples lie far apart
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
    """A 64-bit sum of each of these rows of `pages` [., ...], a row being contiguous bytes.

    On CPU xxh3_64. On a CUDA device, which would take longer to hand the bytes over than to move them to the peer: the
    sum of a row's words, each times an odd number of its own, modulo 2**64. Any change of one word changes it.
    """
    if pages.is_cpu:
        return [xxhash.xxh3_64_intdigest(pages[row].view(torch.uint8).numpy().data) for row in rows]
    from engine.kernels.copy_rows import on_device
    from engine.kernels.row_sums import row_sums

    if not rows:
        return []
    with torch.cuda.device(pages.device), beside_steps(pages.device):
        words = pages.view(torch.uint8).flatten(1)
        if words.shape[1] % 8 == 0:
            words = words.view(torch.int64)
        sums: list[int] = row_sums(words, on_device(list(rows), pages.device), _FACTOR).tolist()
    return [value % 2**64 for value in sums]
