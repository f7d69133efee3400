"""What the disk tier does beside what its disk can: `python -m bench.tier_disk --folder F --json F`.

Blocks of 2 MiB, of an 8B Llama shape with 16 tokens in bfloat16, to and from files in the folder, in rounds that
alternate. `store` is `kv_transfer.tiers.disk`, batches of 16 blocks, checksums with them. `buffered` and `direct` are
plain calls of the kernel by as many threads as the store has, through the page cache and around it (O_DIRECT): what the
medium can. Writes end with the data on the disk (fdatasync), and before reads the page cache is emptied of the file, so
that the medium is measured and not memory; `cached` reads are those of what lies in the page cache.
"""

import argparse
import asyncio
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.provenance import report
from kv_transfer.tiers.disk import DiskStore
from kv_transfer.tiers.store import BlockFormat

_BLOCK = 2 << 20
_BATCH = 16
_READERS, _WRITERS = 4, 2  # threads, as the store has
Timed = Callable[[], float]  # seconds


def _plain(path: Path, memory: list[memoryview], flags: int) -> tuple[Timed, Timed]:
    """Writing and reading all blocks by plain calls."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    os.posix_fallocate(fd, 0, len(memory) * _BLOCK)

    def every(call: Callable[[int], object], threads: int) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(call, range(len(memory))))
        return time.perf_counter() - start

    def write() -> float:
        seconds = every(lambda at: os.pwritev(fd, [memory[at]], at * _BLOCK), _WRITERS)
        return seconds + _synced(fd)

    def read() -> float:
        return every(lambda at: os.preadv(fd, [memory[at]], at * _BLOCK), _READERS)

    return write, read


def _synced(fd: int) -> float:
    start = time.perf_counter()
    os.fdatasync(fd)
    return time.perf_counter() - start


def _forget(path: Path) -> None:
    """Nothing of the file stays in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


async def measure(folder: Path, blocks: int, rounds: int) -> dict[str, float]:
    """GB/s of each, medians."""
    # Pages of their own, as O_DIRECT wants them and as workers' pools are.
    area = memoryview(mmap.mmap(-1, blocks * _BLOCK))
    memory = [area[at * _BLOCK :][:_BLOCK] for at in range(blocks)]
    for at, block in enumerate(memory):
        block[:] = os.urandom(1 << 12) * (_BLOCK >> 12)
        block[:8] = at.to_bytes(8, "little")
    hashes = [at.to_bytes(16, "little") for at in range(blocks)]
    format = BlockFormat("bench", "8b", _BLOCK)
    store = DiskStore(folder, format, (blocks + 1) * (_BLOCK + 8192))
    stored = folder / f"kv-{format.digest.hex()}.blocks"
    flags = {"buffered": 0, "direct": os.O_DIRECT}
    plain = {name: _plain(folder / name, memory, flag) for name, flag in flags.items()}
    seconds: dict[str, list[float]] = {}

    async def of_store(call: Callable[[int], Any]) -> float:
        start = time.perf_counter()
        for at in range(0, blocks, _BATCH):
            done = await call(at)
            assert all(done)
        return time.perf_counter() - start

    for _ in range(rounds):
        await store.clear()
        took = await of_store(lambda at: store.put(hashes[at : at + _BATCH], memory[at : at + _BATCH]))
        fd = os.open(stored, os.O_RDWR)
        seconds.setdefault("write store", []).append(took + _synced(fd))
        os.close(fd)
        for name, (write, _) in plain.items():
            seconds.setdefault(f"write {name}", []).append(write())
        for kind in ("read", "cached read"):
            if kind == "read":
                for path in (stored, folder / "buffered"):
                    _forget(path)
            took = await of_store(lambda at: store.get(hashes[at : at + _BATCH], memory[at : at + _BATCH]))
            seconds.setdefault(f"{kind} store", []).append(took)
            for name in ("buffered", "direct") if kind == "read" else ("buffered",):
                seconds.setdefault(f"{kind} {name}", []).append(plain[name][1]())
    await store.close()
    return {name: blocks * _BLOCK / statistics.median(each) / 1e9 for name, each in seconds.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="on the disk that is measured")
    parser.add_argument("--blocks", type=int, default=128, help="of 2 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        found = asyncio.run(measure(Path(folder), arguments.blocks, arguments.rounds))
    for name, rate in found.items():
        print(f"{name:22} {rate:6.2f} GB/s")
    if arguments.json is not None:
        arguments.json.write_text(report("bench.tier_disk", {"gb_per_s": found}))


if __name__ == "__main__":
    main()
