"""What the media of tiers can do on this machine, in bytes per second: the limits that `bench.tiers` compares with."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis.asyncio
import torch

_BYTES = 1 << 30
_PIECE = 8 << 20
_REDIS_BYTES = 256 << 20
_REDIS_TTL = 3_600_000  # milliseconds
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


def in_place(device: str) -> dict[str, float]:
    """One copy of memory to other memory of the same device, on CPU by one thread; the best of some. Counted once."""
    if device == "cpu":
        to, of = memoryview(bytearray(_BYTES)), memoryview(bytearray(os.urandom(_PIECE) * (_BYTES // _PIECE)))
    else:
        target, source = (torch.empty(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        if device == "cpu":
            to[:] = of
        else:
            target.copy_(source)
            torch.cuda.synchronize()

    best = 0.0
    for _ in range(_TRIES):
        started = time.perf_counter()
        copy()
        best = max(best, _BYTES / (time.perf_counter() - started))
    return {"in_place": best}


def of_redis(url: str, value_bytes: int) -> dict[str, float]:
    """Reads of values of this size from a server, in pipelines as the KV service sends them; the best of some."""
    return {"redis": asyncio.run(_read_redis(url, value_bytes))}


async def _read_redis(url: str, value_bytes: int) -> float:
    names = [f"limit:{number}" for number in range(max(1, _REDIS_BYTES // value_bytes))]
    size = max(1, _PIECE // value_bytes)
    parts = [names[start : start + size] for start in range(0, len(names), size)]
    best = 0.0
    async with redis.asyncio.Redis.from_url(url) as client:
        for name in names:
            await client.set(name, os.urandom(value_bytes))
        for _ in range(_TRIES):
            started = time.perf_counter()
            for part in parts:
                pipeline = client.pipeline(transaction=False)
                for name in part:
                    pipeline.getex(name, px=_REDIS_TTL)
                await pipeline.execute()
            best = max(best, len(names) * value_bytes / (time.perf_counter() - started))
        await client.unlink(*names)
    return best


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
