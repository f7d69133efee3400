"""What the media of tiers can do on this machine, in bytes per second: the limits that `bench.tiers` compares with."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_BYTES = 1 << 30
_PIECE = 8 << 20
_THREADS = 4
_TRIES = 5


def to_device() -> dict[str, float]:
    """One copy of pinned memory to a CUDA device, and back; the best of some."""
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    found = {"host_to_device": 0.0, "device_to_host": 0.0}
    for _ in range(_TRIES):
        for name, (to, of) in {"host_to_device": (device, host), "device_to_host": (host, device)}.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            to.copy_(of, non_blocking=True)
            torch.cuda.synchronize()
            found[name] = max(found[name], _BYTES / (time.perf_counter() - started))
    return found


def of_disk(folder: Path) -> dict[str, float]:
    """Reads of a file that was just written, by several threads: out of the page cache, and from the disk."""
    path = folder / "limit"
    piece = os.urandom(_PIECE)
    with path.open("wb") as file:
        for _ in range(_BYTES // _PIECE):
            file.write(piece)
        started = time.perf_counter()
        os.fsync(file.fileno())
        flushed = time.perf_counter() - started
    rates = {"page_cache": max(_read(path) for _ in range(_TRIES))}
    forget(path)
    rates["disk"] = _read(path)
    path.unlink()
    return rates | {"seconds_of_fsync": flushed}


def forget(path: Path) -> None:
    """Has the kernel drop what it has of a file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(path: Path) -> float:
    """Bytes per second."""
    descriptor = os.open(path, os.O_RDONLY)
    size, room = os.fstat(descriptor).st_size, [memoryview(bytearray(_PIECE)) for _ in range(_THREADS)]

    def some(number: int) -> None:
        for start in range(number * _PIECE, size, _THREADS * _PIECE):
            os.preadv(descriptor, [room[number]], start)

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            started = time.perf_counter()
            list(threads.map(some, range(_THREADS)))
            return size / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
