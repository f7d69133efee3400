"""The file of a disk tier: a header, then slots of one size, each a block with a footer that says what it is.

The file has room for all its slots before they are written, and grows by extents up to its bound, as long as the
filesystem has space left. A slot is written by one call and believed only if its footer and the checksum of its bytes
are right, so blocks are not synced: what a crash tears is a miss. A footer counts for one epoch of the file, which the
header names, so that all is forgotten by one write. Little-endian throughout.

A file serves one format of blocks and one process, which has it locked. Files of other formats in its folder, which
nobody has locked, give way when the bound of the folder would be passed, least recently written first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import structlog
import xxhash

from kv_transfer.tiers.store import BlockFormat, StoreError, checksum

log = structlog.get_logger()

VERSION = 1
_PAGE = 4096
_EXTENT = 64 << 20  # bytes by which a file grows, or one slot if that is more
_SPARE = 1 << 30  # bytes that are left free on the filesystem, or 2 % of a small one
_HEADER = struct.Struct("<8sIIQQ16s")  # magic, version, 0, bytes of a block, epoch, format
_FOOTER = struct.Struct("<4sIQQ16s16s16s16sIIQ")  # magic, version, epoch, sequence, hash, format, parent, owner, ...
_SUM = struct.Struct("<Q")  # xxh3_64 of what is before it
_MAGIC, _SLOT_MAGIC = b"TNDMDISK", b"TNDM"
FOOTER_BYTES = _FOOTER.size + _SUM.size
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_NAME = re.compile(r"kv-[0-9a-f]{32}\.blocks")


class Footer(NamedTuple):
    """What a slot holds. `sequence` grows with each write to the file."""

    sequence: int
    key: bytes
    position: int
    parent: bytes
    owner: bytes


class SlotFile:
    """Slots 0 to `num_slots` - 1. Reads and writes of different slots may run in several threads at once.

    Raises StoreError if the folder cannot be used or another process has the file.
    """

    def __init__(self, folder: Path, format: BlockFormat, capacity_bytes: int) -> None:
        self._format = format
        self._slot_bytes = -(-(format.block_bytes + FOOTER_BYTES) // _PAGE) * _PAGE
        self.max_slots = (capacity_bytes - _PAGE) // self._slot_bytes
        self._capacity = capacity_bytes
        if self.max_slots < 1:
            raise StoreError(
                f"a disk tier of {capacity_bytes} bytes holds no block of {format.block_bytes} bytes: make it larger"
            )
        self.path = folder / f"kv-{format.digest.hex()}.blocks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = _open_locked(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be used as a disk tier: {error.strerror}") from error
        try:
            self._begin()
        except OSError as error:
            self.close()
            raise StoreError(f"{self.path} cannot be used as a disk tier: {error.strerror}") from error

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in the file."""
        return self._slot_bytes

    def _begin(self) -> None:
        size = os.fstat(self._fd).st_size
        epoch = self._read_epoch() if size else None
        if epoch is None:
            if size:
                log.warning("disk tier starts anew: not a file of this version and format", path=str(self.path))
            os.ftruncate(self._fd, 0)
            self._epoch = int.from_bytes(os.urandom(6), "little")  # what an earlier file left on the device is no slot
            self._write_first_header()
        else:
            self._epoch = epoch
            # A smaller bound than last time. Whatever lay behind is lost, the order of slots saying nothing of worth.
            os.ftruncate(self._fd, min(size, _PAGE + self.max_slots * self._slot_bytes))
        self.num_slots = max(0, os.fstat(self._fd).st_size - _PAGE) // self._slot_bytes

    def _read_epoch(self) -> int | None:
        """None if the header is not one of this version and format."""
        data = os.pread(self._fd, _HEADER.size + _SUM.size, 0)
        if len(data) < _HEADER.size + _SUM.size:
            return None
        magic, version, _, block_bytes, epoch, digest = _HEADER.unpack_from(data)
        is_right = (magic, version, block_bytes, digest) == (
            _MAGIC,
            VERSION,
            self._format.block_bytes,
            self._format.digest,
        )
        return epoch if is_right and _sum(data[: _HEADER.size]) == data[_HEADER.size :] else None

    def _write_header(self) -> None:
        header = _HEADER.pack(_MAGIC, VERSION, 0, self._format.block_bytes, self._epoch, self._format.digest)
        page = header + _sum(header)
        _write_all(self._fd, [memoryview(page.ljust(_PAGE, b"\0"))], 0)

    def _write_first_header(self) -> bool:
        """Whether there was room for it."""
        try:
            self._write_header()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            os.ftruncate(self._fd, 0)
            return False
        return True

    def grow(self) -> int:
        """Adds slots, if the bounds of file and filesystem allow; how many."""
        if os.fstat(self._fd).st_size < _PAGE and not self._write_first_header():
            return 0
        slots = min(max(1, _EXTENT // self._slot_bytes), self.max_slots - self.num_slots)
        if slots < 1:
            return 0
        start, length = self._offset(self.num_slots), slots * self._slot_bytes
        self._make_others_give_way(start + length)
        filesystem = os.fstatvfs(self._fd)
        spare = min(_SPARE, filesystem.f_blocks * filesystem.f_frsize // 50)
        free = filesystem.f_bavail * filesystem.f_frsize - spare
        if free < length:
            slots, length = free // self._slot_bytes, free // self._slot_bytes * self._slot_bytes
        if slots < 1:
            return 0
        try:
            os.posix_fallocate(self._fd, start, length)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            if error.errno not in _FULL:
                raise
            return 0
        self.num_slots += slots
        return slots

    def scan(self) -> Iterator[tuple[int, Footer]]:
        """What the slots hold by their footers; the bytes of blocks are not looked at."""
        for slot in range(self.num_slots):
            try:
                data = os.pread(self._fd, FOOTER_BYTES, self._offset(slot) + self._format.block_bytes)
            except OSError:
                continue
            if (parsed := self._parse(data)) is not None:
                yield slot, parsed[0]

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        """Whether the slot holds that block, sound; `into` has its bytes then. Raises OSError."""
        data = bytearray(FOOTER_BYTES)
        if not _read_all(self._fd, [into.cast("B"), memoryview(data)], self._offset(slot)):
            return False
        parsed = self._parse(bytes(data))
        return parsed is not None and parsed[0].key == key and parsed[1] == checksum(into)

    def write(self, slot: int, footer: Footer, block: memoryview) -> None:
        """Raises OSError; the slot may hold anything then."""
        packed = _FOOTER.pack(
            _SLOT_MAGIC,
            VERSION,
            self._epoch,
            footer.sequence,
            footer.key,
            self._format.digest,
            footer.parent,
            footer.owner,
            footer.position,
            0,
            checksum(block),
        )
        _write_all(self._fd, [block.cast("B"), memoryview(packed + _sum(packed))], self._offset(slot))

    def erase(self, slot: int) -> None:
        """The slot holds no block any more. Raises OSError."""
        _write_all(self._fd, [memoryview(bytes(FOOTER_BYTES))], self._offset(slot) + self._format.block_bytes)

    def erase_all(self) -> None:
        """No slot holds a block that was written before. Raises OSError."""
        self._epoch += 1
        self._write_header()
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Unlocks the file."""
        os.close(self._fd)

    def _offset(self, slot: int) -> int:
        return _PAGE + slot * self._slot_bytes

    def _parse(self, data: bytes) -> tuple[Footer, int] | None:
        """A footer of this file, and the checksum of its block; None for anything else."""
        if len(data) != FOOTER_BYTES or _sum(data[: _FOOTER.size]) != data[_FOOTER.size :]:
            return None
        magic, version, epoch, sequence, key, digest, parent, owner, position, _, block_sum = _FOOTER.unpack_from(data)
        if (magic, version, epoch, digest) != (_SLOT_MAGIC, VERSION, self._epoch, self._format.digest):
            return None
        return Footer(sequence, key, position, parent if any(parent) else b"", owner if any(owner) else b""), block_sum

    def _make_others_give_way(self, size: int) -> None:
        """Removes files of other formats that nobody uses until the folder keeps its bound with `size` of this one."""
        others = [path for path in self.path.parent.iterdir() if _NAME.fullmatch(path.name) and path != self.path]
        stats = [(path, path.stat()) for path in others]
        total = size + sum(stat.st_size for _, stat in stats)
        for path, stat in sorted(stats, key=lambda each: each[1].st_mtime):
            if total <= self._capacity:
                return
            with contextlib.suppress(OSError):
                fd = _open_locked(path)
                try:
                    path.unlink()
                finally:
                    os.close(fd)
                total -= stat.st_size
                log.info("disk tier removed a file of another model", path=str(path), bytes=stat.st_size)


def _open_locked(path: Path) -> int:
    """Raises OSError, also if another process has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise OSError(
                error.errno, "another process has it open; give each a folder of its own", str(path)
            ) from error
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # removed between the two calls


def _sum(data: bytes) -> bytes:
    return _SUM.pack(xxhash.xxh3_64_intdigest(data))


def _read_all(fd: int, pieces: list[memoryview], offset: int) -> bool:
    """Whether the file has so many bytes there."""
    while pieces:
        count = os.preadv(fd, pieces, offset)
        if count == 0:
            return False
        offset += count
        pieces = _rest(pieces, count)
    return True


def _write_all(fd: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        count = os.pwritev(fd, pieces, offset)
        offset += count
        pieces = _rest(pieces, count)


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind the first `count` bytes."""
    while pieces and count >= pieces[0].nbytes:
        count -= pieces[0].nbytes
        pieces = pieces[1:]
    return [pieces[0][count:], *pieces[1:]] if pieces else []
