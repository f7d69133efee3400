"""Reads stored tensors into their places, by several threads.

One thread can neither copy out of the page cache nor drive a disk at full speed, so tensors are cut into pieces of
whole rows that are read in parallel. On CPU bytes go straight into the parameter if it has their type. Otherwise, and
for a CUDA device, they go through a buffer of the thread; for the device it is pinned, so that a piece travels while
the next one is read.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine.config import ModelError
from engine.weights.place import Place
from engine.weights.safetensors_file import StoredTensor

Progress = Callable[[int, int, str], None]  # bytes read so far, bytes in all, name of the tensor

_THREADS = 8
_PIECE = 8 << 20  # bytes


@dataclass(frozen=True)
class _Piece:
    """Rows of one tensor."""

    tensor: StoredTensor
    place: Place
    first: int  # row of the tensor
    count: int
    row_bytes: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.row_bytes

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """The rows, read into `buffer` uint8. Raises ModelError."""
        self.read_into(buffer[: self.size])
        return buffer[: self.size].view(self.tensor.dtype).view(self.count, *self.tensor.shape[1:])

    def read_into(self, memory: torch.Tensor) -> None:
        """Reads the rows into contiguous memory of exactly their size. Raises ModelError."""
        view: memoryview = memory.reshape(-1).view(torch.uint8).numpy().data
        offset = self.tensor.offset + self.first * self.row_bytes
        try:
            file = os.open(self.tensor.path, os.O_RDONLY)
            try:
                while view:
                    if not (count := os.preadv(file, [view], offset)):
                        raise OSError("the file ends too early")
                    view, offset = view[count:], offset + count
            finally:
                os.close(file)
        except OSError as error:
            raise ModelError(f"{self.tensor.path} cannot be read at tensor {self.tensor.name}: {error}") from error


def read_tensors(pairs: Sequence[tuple[StoredTensor, Place]], progress: Progress) -> None:
    """Fills the places, which lie on one device. Raises ModelError for a file that cannot be read to its end."""
    pieces = [piece for tensor, place in pairs for piece in _cut(tensor, place)]
    if not pieces:
        return
    device = pieces[0].place.destination.device
    buffer_size = max(piece.size for piece in pieces)
    local = threading.local()

    def read(piece: _Piece) -> None:
        if not hasattr(local, "reader"):
            local.reader = (_CudaReader if device.type == "cuda" else _Reader)(buffer_size, device)
        with torch.inference_mode():
            local.reader.read(piece)

    total, done = sum(piece.size for piece in pieces), 0
    with ThreadPoolExecutor(min(_THREADS, len(pieces)), "weights") as pool:
        try:
            for piece, reading in [(piece, pool.submit(read, piece)) for piece in pieces]:
                progress(done, total, piece.tensor.name)
                reading.result()
                done += piece.size
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the readers' streams held
    progress(total, total, pieces[-1].tensor.name)


def _cut(tensor: StoredTensor, place: Place) -> Iterator[_Piece]:
    """Pieces of the rows that the place wants."""
    rows = place.rows
    if not tensor.size or not rows:
        return
    row_bytes = tensor.size // tensor.shape[0] if tensor.shape else tensor.size
    step = max(1, _PIECE // row_bytes)
    for first in range(rows.start, rows.stop, step):
        yield _Piece(tensor, place, first, min(step, rows.stop - first), row_bytes)


class _Reader:
    """One thread's reader for places on CPU."""

    def __init__(self, buffer_size: int, device: torch.device) -> None:
        self._buffer = torch.empty(buffer_size, dtype=torch.uint8, device=device)

    def read(self, piece: _Piece) -> None:
        """Puts the piece into its place."""
        window = piece.place.window(piece.first, piece.count, piece.tensor.dtype)
        if window is not None:
            piece.read_into(window)
        else:
            piece.place.put(piece.first, piece.read(self._buffer))


class _CudaReader:
    """One thread's reader for places on a CUDA device, with a stream and two buffers of its own."""

    def __init__(self, buffer_size: int, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread: pinning memory would otherwise start the first device
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [torch.empty(buffer_size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def read(self, piece: _Piece) -> None:
        """Puts the piece into its place; returns while it travels."""
        self._turn ^= 1
        sent = self._sent[self._turn]
        sent.synchronize()
        values = piece.read(self._buffers[self._turn])
        with torch.cuda.stream(self._stream):
            piece.place.put(piece.first, values.to(self._device, non_blocking=True))
            sent.record(self._stream)
