"""The disk tier: what a restart finds, what a broken file or device comes to, what fits."""

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tier_blocks import FORMAT, content, key, room

from engine.request import BlockRemoved, BlockStored, CacheCleared
from kv_transfer.tiers.disk import DiskStore
from kv_transfer.tiers.slot_file import FOOTER_BYTES, Footer, SlotFile
from kv_transfer.tiers.store import BlockFormat, Origin, StoreError

SLOT = 8192
CAPACITY = 4096 + 16 * SLOT


async def put(store: DiskStore, *numbers: int) -> list[bool]:
    return await store.put([key(each) for each in numbers], [content(each) for each in numbers])


async def get(store: DiskStore, *numbers: int) -> list[bool]:
    """What is found; what is, is right."""
    into = room(len(numbers))
    found = await store.get([key(each) for each in numbers], into)
    assert all(
        memory == content(number) for memory, number, is_there in zip(into, numbers, found, strict=True) if is_there
    )
    return found


def path_of(folder: Path) -> Path:
    (found,) = folder.glob("kv-*.blocks")
    return found


async def test_a_restart_finds_the_blocks(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    assert await put(store, *range(10)) == [True] * 10
    await store.delete([key(3)])
    await store.close()
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    assert set(store.hashes()) == {key(each) for each in range(10) if each != 3} and not store.drain_events()
    assert await get(store, *range(10)) == [each != 3 for each in range(10)]
    # The order of use is that of writing: a head is younger than its tail.
    await put(store, *range(100, 108))
    assert set(store.hashes()) >= {key(0)} and key(9) not in store.hashes()
    await store.clear()
    await store.close()
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    assert store.hashes() == []
    await store.close()


async def test_events_tell_what_is_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, 1, 2)
    await store.delete([key(1)])
    await store.clear()
    assert store.drain_events() == [BlockStored([key(1), key(2)]), BlockRemoved([key(1)]), CacheCleared()]
    await put(store, *range(10, 26))
    store.drain_events()
    await put(store, 30)
    assert store.drain_events() == [BlockRemoved([key(25)]), BlockStored([key(30)])]
    await store.close()


async def test_pins_and_readers_stay(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, *range(16))
    store.pin([key(15), key(14)])
    await put(store, *range(20, 40))
    assert await get(store, 14, 15) == [True, True]
    assert store.counts.evicted == 14 and store.counts.skipped == 6  # no more room than for 14 of the 20
    store.unpin([key(15), key(14)])
    await put(store, *range(50, 66))
    assert await get(store, 14, 15) == [False, False]
    await store.close()


def refuse(path: Path) -> None:
    raise PermissionError(errno.EPERM, "not permitted", str(path))


async def test_other_models_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, 1)
    with pytest.raises(StoreError, match="a folder of its own"):
        DiskStore(tmp_path, FORMAT, CAPACITY)
    other = DiskStore(tmp_path, replace(FORMAT, fingerprint="model-b"), CAPACITY)
    assert await get(other, 1) == [False]
    await other.close()
    await store.close()
    # The bound is the folder's: what nobody uses gives way, and is let go of where it cannot be removed.
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        third = DiskStore(tmp_path, replace(FORMAT, layout="other"), CAPACITY)
        await put(third, 1)
        await third.close()
    third._file.path.unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert not [each for each in Path("/proc/self/fd").iterdir() if each.resolve().parent == tmp_path]
    third = DiskStore(tmp_path, replace(FORMAT, layout="other"), CAPACITY)
    await put(third, 1)
    assert len(list(tmp_path.glob("kv-*.blocks"))) == 1
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= CAPACITY
    await third.close()


async def test_swapped_files_are_not_used(tmp_path: Path) -> None:
    other = replace(FORMAT, fingerprint="model-b")
    for format in (FORMAT, other):
        store = DiskStore(tmp_path, format, 200 << 20)
        await put(store, 1)
        await store.close()
    first, second = tmp_path.glob("kv-*.blocks")
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    for format in (FORMAT, other):
        store = DiskStore(tmp_path, format, 200 << 20)
        assert await get(store, 1) == [False] and await put(store, 1) == [True] and await get(store, 1) == [True]
        await store.close()


@pytest.mark.parametrize("size", [0, 1, 40, 4096, 4097, *range(8192, CAPACITY, 4096), CAPACITY - 1])
async def test_truncated(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, *range(16))
    os.truncate(path_of(tmp_path), size)
    whole = max(0, (size - 4096) // SLOT)
    part = (size - 4096) % SLOT >= FORMAT.block_bytes + FOOTER_BYTES  # all but padding
    assert sum(await get(store, *range(16))) == whole + part == len(store.hashes())
    assert store.counts.corrupt == 16 - whole - part
    assert await put(store, *range(16)) == [True] * 16 and await get(store, *range(16)) == [True] * 16
    os.truncate(path_of(tmp_path), size)
    await store.close()
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    assert sum(await get(store, *range(16))) == whole
    await put(store, *range(16))
    assert await get(store, *range(16)) == [True] * 16
    await store.close()


@pytest.mark.parametrize("at", [0, 9, 4096, 4096 + 4999, 4096 + 5000, 4096 + 5020, 4096 + 5000 + FOOTER_BYTES - 1])
@pytest.mark.parametrize("restarted", [False, True])
async def test_any_damage_is_a_miss(tmp_path: Path, at: int, restarted: bool) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, 1, 2)
    if restarted:
        await store.close()
    with path_of(tmp_path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    if restarted:
        store = DiskStore(tmp_path, FORMAT, CAPACITY)
    hit = await get(store, 1, 2)
    if at >= 4096:
        assert sorted(hit) == [False, True] and len(store.hashes()) == 1
    elif restarted:
        assert hit == [False, False]  # its header is not right: none of it is believed
    await put(store, 1, 2)
    assert await get(store, 1, 2) == [True, True]
    await store.close()


async def test_swapped_blocks_are_misses(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, 1, 2)
    with path_of(tmp_path).open("r+b") as file:
        file.seek(4096)
        first, second = file.read(SLOT), file.read(SLOT)
        file.seek(4096)
        file.write(second + first)
    assert await get(store, 1, 2) == [False, False] and store.counts.corrupt == 2
    await store.close()


async def test_killed_in_the_midst_of_writing(tmp_path: Path) -> None:
    """What a process that was killed left is right or a miss."""
    script = """
        import asyncio, sys, itertools
        from pathlib import Path
        from kv_transfer.tiers.disk import DiskStore
        from tier_blocks import FORMAT, content, key

        async def main():
            store = DiskStore(Path(sys.argv[1]), FORMAT, int(sys.argv[2]))
            contents = [content(each) for each in range(64)]
            for turn in itertools.count():
                some = [(turn * 7 + each) % 64 for each in range(8)]
                await store.put([key(each) for each in some], [contents[each] for each in some])
                if turn == 3:
                    print("writing", file=sys.stderr, flush=True)

        asyncio.run(main())
    """
    found = 0
    for turn in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(CAPACITY)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stderr is not None
        try:
            assert await asyncio.to_thread(process.stderr.readline) == b"writing\n"
            await asyncio.sleep(0.02 * turn)
        finally:
            process.kill()
        process.wait()
        process.stderr.close()
        store = DiskStore(tmp_path, FORMAT, CAPACITY)
        known = len(store.hashes())
        hits = sum(await get(store, *range(64)))
        assert hits >= known - 2 and hits == len(store.hashes())  # a slot for each thread may be torn
        found += hits
        await store.close()
    assert found


async def test_full_filesystem_is_no_failure(tmp_path: Path) -> None:
    """No room for a file of the size that was asked for, and the process may not write as much either."""
    script = """
        import asyncio, resource, sys
        from pathlib import Path
        from kv_transfer.tiers.disk import DiskStore
        from tier_blocks import FORMAT, content, key, room

        async def main():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 5 * 8192, resource.RLIM_INFINITY))
            store = DiskStore(Path(sys.argv[1]), FORMAT, 4096 + 5 * 8192 if sys.argv[2] == "fits" else 1 << 30)
            keys, blocks = [key(each) for each in range(9)], [content(each) for each in range(9)]
            stored = await store.put(keys, blocks)
            found = await store.get(keys, room(9))
            assert found == stored == [sys.argv[2] == "fits" and each < 5 for each in range(9)], (found, stored)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 2 * 8192 + 100, resource.RLIM_INFINITY))
            await store.put(keys[5:], blocks[5:])
            found = await store.get(keys, room(9))
            assert all(each in store.hashes() for at, each in enumerate(keys) if found[at])
            assert sys.argv[2] == "no" or store.counts.faults
            await store.close()

        asyncio.run(main())
    """
    for fits in ("fits", "no"):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / fits), fits],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


async def test_device_that_fails(tmp_path: Path) -> None:
    """The kernel's own EIO: the first pages of a process's memory can be neither read nor written."""
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await put(store, 1, 2)
    good = os.dup(store._file._fd)
    bad = os.open("/proc/self/mem", os.O_RDWR)
    os.dup2(bad, store._file._fd)
    os.close(bad)
    assert await get(store, 1) == [False]
    assert await put(store, 3) == [False] and await put(store, 4) == [False]
    assert store.counts.faults >= 3 and store.breaker.is_open
    faults = store.counts.faults
    assert await get(store, 2) == [False] and await put(store, 5) == [False]
    assert store.counts.faults == faults  # left alone meanwhile
    os.dup2(good, store._file._fd)
    os.close(good)
    async with asyncio.timeout(10):
        while not await store.match([key(6)]):
            await asyncio.sleep(0.1)
            await put(store, 6)
    assert await get(store, 2, 6) == [True, True] and not store.breaker.is_open
    await store.close()


async def test_a_cancelled_read_leaves_memory_alone(tmp_path: Path) -> None:
    format = BlockFormat("model-a", "large", 8 << 20)
    store = DiskStore(tmp_path, format, 100 << 20)
    keys = [key(each) for each in range(8)]
    await store.put(keys, [content(each, format.block_bytes) for each in range(8)])
    into = room(8, format.block_bytes)
    reading = asyncio.ensure_future(store.get(keys, into))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    after = [bytes(each[:64]) for each in into], [bytes(each[-64:]) for each in into]
    await asyncio.sleep(0.1)
    assert after == ([bytes(each[:64]) for each in into], [bytes(each[-64:]) for each in into])
    assert await store.put(keys[:1], into[:1]) == [True] and not store._reading
    await store.close()


async def test_deleted_while_it_is_written(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    writing = asyncio.ensure_future(put(store, *range(8)))
    while not store._writing:
        await asyncio.sleep(0)
    await store.delete([key(1)])
    assert await writing == [each != 1 for each in range(8)]
    await store.close()
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    assert await get(store, 1, 2) == [False, True]
    await store.close()


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """Slots of 1 GiB; the blocks of a sparse file take no room."""
    format = BlockFormat("model-a", "huge", (1 << 30) - 4096)
    file = SlotFile(tmp_path, format, 8 << 30)
    os.ftruncate(file._fd, 8 << 30)
    small = BlockFormat("model-a", "small", 4096 - FOOTER_BYTES)
    file.close()
    file = SlotFile(tmp_path, small, 8 << 30)
    os.ftruncate(file._fd, 8 << 30)
    edge = (1 << 32) // 4096
    for slot in (edge - 2, edge - 1, edge, edge + 1):
        file.write(slot, Footer(slot, key(slot), 0, b"", b""), content(slot, small.block_bytes))
    for slot in (edge - 2, edge - 1, edge, edge + 1):
        (into,) = room(1, small.block_bytes)
        assert file.read(slot, key(slot), into) and into == content(slot, small.block_bytes)
    file.close()


def test_what_cannot_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make it larger"):
        DiskStore(tmp_path, FORMAT, 4096)
    with pytest.raises(StoreError, match="no policy"):
        DiskStore(tmp_path, FORMAT, CAPACITY, "best")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        DiskStore(tmp_path / "file", FORMAT, CAPACITY)


async def test_owners_and_positions_outlive_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, CAPACITY)
    await store.put([key(7)], [content(7)], Origin(5, key(6), key(99)))
    assert [footer for _, footer in store._file.scan()] == [Footer(1, key(7), 5, key(6), key(99))]
    await store.close()


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_two_share_a_filesystem_that_is_too_small_for_both(small_filesystem: Path) -> None:
    """Each has a bound that the filesystem could keep for one of them alone, and somebody else fills the rest."""
    stores = [DiskStore(small_filesystem / each, FORMAT, 6 << 20) for each in ("a", "b")]
    for start in range(0, 1200, 60):
        for store in stores:
            await put(store, *range(start, start + 60))
    first, second = (len(store.hashes()) for store in stores)
    assert first == 767 and 100 < second < 300, (first, second)
    assert all(store.counts.evicted and not store.counts.faults for store in stores)
    with (small_filesystem / "other").open("wb") as other, pytest.raises(OSError):
        while True:
            other.write(bytes(1 << 16))
            other.flush()
    for store in stores:
        assert await put(store, *range(5000, 5060)) == [True] * 60  # slots have their room already
        assert await get(store, *range(5000, 5060)) == [True] * 60
    third = DiskStore(small_filesystem / "c", FORMAT, 6 << 20)
    assert await put(third, 1) == [False] and await get(third, 1) == [False] and third.counts.skipped == 1
    for store in (*stores, third):
        await store.close()
