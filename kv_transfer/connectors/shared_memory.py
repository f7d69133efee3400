"""Same host: the receiver's whole pool lies in /dev/shm, and the sender writes its pages in place. One copy, no socket.

The file holds the pool, then one page that names it, then a table: which generation of each block may be written.
A mapping cannot be taken back, so shutting a writer out rests on two things. The sender checks the table before each
write; the receiver strikes a block out of it when its transfer is over. And the sender holds a lock on a byte of the
file that stands for the transfer, from the check to the end of the write. Once the receiver has struck the blocks out
and finds that byte unlocked, no write is under way and none will follow. The kernel drops the locks of a process that
dies; a writer that is frozen in the middle of a write keeps its lock, and its blocks stay set aside.
"""

import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kv_transfer.connectors.base import (
    Capabilities,
    ConnectorCounters,
    ConnectorError,
    PoolDescription,
    PushRefused,
    ReceiverConnector,
    SenderConnector,
    SenderIdentity,
)
from kv_transfer.process_identity import Life, boot_id, life
from kv_transfer.references import BlockRef

CAPABILITIES = Capabilities("shared_memory", cross_host=False, one_sided=True)
PREFIX = "tandem-kv-"
_NAME = re.compile(PREFIX + "[0-9a-f]{32}")
_DIRECTORY = Path("/dev/shm")
_PAGE = mmap.PAGESIZE
_CLOSED = 2**64 - 1  # in the table: no generation of this block may be written
_OWNER_BYTE = 0  # locked by the segment's owner for as long as it lives


class SegmentDescription(msgspec.Struct, frozen=True):
    """What a sender must know to map a segment."""

    pool: PoolDescription
    pool_bytes: int  # in the segment
    name: str
    token: bytes  # also stands in the segment: proves that both sides see the same memory
    boot_id: str
    stays: bool = False  # its pages are never given back while it is there, so that a device may know them by address


class SharedSegment:
    """Memory of `pool_bytes` in /dev/shm under a random name, mode 0600, with a table of `num_blocks` generations.

    `stays`: `release` is never called.
    """

    def __init__(self, pool_bytes: int, num_blocks: int, *, stays: bool = False) -> None:
        self.pool_bytes = pool_bytes
        self.stays = stays
        size = _table_offset(pool_bytes) + 8 * num_blocks
        try:
            stats = os.statvfs(_DIRECTORY)
        except OSError as error:
            raise ConnectorError(f"there is no shared memory here, use the tcp connector: {error}") from error
        free = stats.f_bavail * stats.f_frsize
        if size > free:
            raise ConnectorError(
                f"the KV pool needs {size >> 20} MiB of /dev/shm and {free >> 20} MiB are free: "
                "enlarge it (docker: shm_size), give the KV cache less memory, or use the tcp connector"
            )
        try:
            self.name, self.descriptor = _create()
        except OSError as error:
            raise ConnectorError(f"no file can be made in /dev/shm, use the tcp connector: {error}") from error
        try:
            # Takes the pages now: a full /dev/shm is an error here and not a SIGBUS later.
            os.posix_fallocate(self.descriptor, 0, size)
            self._mapping = mmap.mmap(self.descriptor, size)
        except OSError as error:
            self.unlink()
            raise ConnectorError(f"/dev/shm has no {size >> 20} MiB for the KV pool: {error}") from error
        self.token = secrets.token_bytes(32)
        header = _header_offset(pool_bytes)
        self._mapping[header : header + len(self.token)] = self.token
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            self._mapping, dtype=np.uint64, count=num_blocks, offset=_table_offset(pool_bytes)
        )
        self.generations[:] = _CLOSED

    @property
    def buffer(self) -> memoryview:
        """The pool's bytes."""
        return memoryview(self._mapping)[: self.pool_bytes]

    @property
    def path(self) -> str:
        """The file, whose first bytes are the pool's."""
        return str(_DIRECTORY / self.name)

    def describe(self, pool: PoolDescription) -> SegmentDescription:
        """What others must know to map it."""
        return SegmentDescription(pool, self.pool_bytes, self.name, self.token, boot_id(), self.stays)

    def release(self) -> None:
        """Gives the pool's pages back. Senders keep their mappings, and what one wrote would take pages again."""
        self._mapping.madvise(mmap.MADV_REMOVE, 0, self.pool_bytes)

    def reserve(self) -> None:
        """Takes the pool's pages again, full of zeros. Raises ConnectorError if /dev/shm is full."""
        try:
            os.posix_fallocate(self.descriptor, 0, self.pool_bytes)
        except OSError as error:
            raise ConnectorError(f"/dev/shm has no {self.pool_bytes >> 20} MiB for the KV pool: {error}") from error

    def unlink(self) -> None:
        """Removes the name; the memory goes with the last mapping. Idempotent."""
        (_DIRECTORY / self.name).unlink(missing_ok=True)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedMemoryReceiver(ReceiverConnector):
    """Offers the pool in `segment`."""

    capabilities = CAPABILITIES

    def __init__(self, segment: SharedSegment, pool: PoolDescription) -> None:
        self.counters = ConnectorCounters()
        self._segment = segment
        self._pool = pool
        self._expected: dict[str, Sequence[BlockRef]] = {}

    def describe(self) -> bytes:
        """Name, token and shape of the segment."""
        return msgspec.msgpack.encode(self.segment)

    @property
    def segment(self) -> SegmentDescription:
        """The segment, for senders."""
        return self._segment.describe(self._pool)

    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """Publishes the generations: senders refuse any other."""
        self._expected[transfer_id] = blocks
        for ref in blocks:
            self._segment.generations[ref.block_id] = ref.generation

    def bytes_landed(self, transfer_id: str) -> int | None:
        """Unknown: the sender writes by itself."""
        return None

    def failure(self, transfer_id: str) -> str | None:
        """Unknown: the sender checks, and says so over the control stream."""
        return None

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Strikes the blocks out; whether no write of the transfer was under way."""
        self.finish(transfer_id)
        if self._segment.descriptor < 0:
            return False
        byte = _transfer_byte(transfer_id)
        if not _try_lock(self._segment.descriptor, byte):
            return False
        _unlock(self._segment.descriptor, byte)
        # A device's copies (`pinned`) may outlive the lock of a process that dies, see `cuda_ipc`.
        return not self._segment.stays or life(sender) is not Life.ENDS

    def finish(self, transfer_id: str) -> None:
        """Strikes the blocks out of the table."""
        for ref in self._expected.pop(transfer_id, ()):
            if self._segment.generations[ref.block_id] == ref.generation:
                self._segment.generations[ref.block_id] = _CLOSED

    def close(self) -> None:
        """Removes the segment."""
        self._segment.unlink()


class SharedMemorySender(SenderConnector):
    """Writes into the pool that `description` names. Raises ConnectorError if it is not the same memory."""

    description_type = SegmentDescription

    def __init__(self, description: bytes, layout: str) -> None:
        try:
            offer = msgspec.msgpack.decode(description, type=self.description_type)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of shared memory: {error}") from error
        self.counters = ConnectorCounters()
        self.pool = offer.pool
        self.pool.require_layout(layout)
        self._segment = MappedSegment(offer)

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Copies the rows in one go."""
        try:
            destination = self.admit(transfer_id, range(layer, layer + 1), source, source_blocks, blocks)
            # Views, as the layer of a block is contiguous: each row is copied once.
            rows = source[:, layer].flatten(1).view(torch.uint8).numpy()
            for source_block, block in zip(source_blocks, destination, strict=True):
                self._segment.rows[block, layer] = rows[source_block]
        finally:
            self.leave(transfer_id)
        return self.count(len(blocks))

    def admit(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> list[int]:
        """Rows of the pool that this push may write until `leave`. Raises ConnectorError if it may not."""
        pool = self.pool
        pool.check_push(layers, source, source_blocks, blocks)
        for ref in blocks:
            if ref.incarnation != pool.incarnation or not 0 <= ref.block_id < pool.num_blocks:
                self.counters.refuse("range" if ref.incarnation == pool.incarnation else "incarnation")
                raise PushRefused(f"block {ref.block_id} is not in the receiver's pool")
        destination = [ref.block_id for ref in blocks]
        try:
            self._segment.check()
            locked = _try_lock(self._segment.descriptor, _transfer_byte(transfer_id))
        except OSError as error:
            raise ConnectorError(f"the receiver's shared memory cannot be used any more: {error}") from error
        if not locked:
            self.counters.refuse("fenced")
            raise PushRefused("the receiver is shutting this transfer out")
        if self._segment.generations[destination].tolist() != [ref.generation for ref in blocks]:
            self.counters.refuse("generation")
            raise PushRefused("the receiver does not expect these blocks any more")
        return destination

    def leave(self, transfer_id: str) -> None:
        """Nothing is being written for the transfer. Idempotent."""
        if self._segment.descriptor >= 0:
            _unlock(self._segment.descriptor, _transfer_byte(transfer_id))

    def count(self, num_rows: int) -> int:
        """Bytes of so many blocks' layers, which were pushed."""
        num_bytes = num_rows * self.pool.layer_bytes
        self.counters.bytes += num_bytes
        return num_bytes

    def flush(self, transfer_id: str) -> None:
        """Nothing is queued."""

    def stop(self, transfer_id: str) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Drops the mapping."""
        self._segment.close()


class MappedSegment:
    """Another process's segment in this one's memory. Raises ConnectorError if it is not the one that is meant.

    `rows` [num_blocks, L, layer_bytes], uint8, are its pool, none if it holds none.
    """

    def __init__(self, offer: SegmentDescription) -> None:
        if offer.boot_id != boot_id() or not _NAME.fullmatch(offer.name) or len(offer.token) != 32:
            raise ConnectorError("the peer's memory is not on this host")
        try:
            descriptor = os.open(_DIRECTORY / offer.name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ConnectorError(f"the peer's shared memory cannot be opened: {error.strerror}") from error
        try:
            self._map(descriptor, offer)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def _map(self, descriptor: int, offer: SegmentDescription) -> None:
        pool, token, pool_bytes = offer.pool, offer.token, offer.pool_bytes
        if pool_bytes not in (0, pool.num_blocks * pool.block_bytes):
            raise ConnectorError("the peer's shared memory does not hold its pool")
        self._size = size = _table_offset(pool_bytes) + 8 * pool.num_blocks
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise ConnectorError("the peer's shared memory has another size than it says")
        self._mapping = mmap.mmap(descriptor, size)
        header = _header_offset(pool_bytes)
        if self._mapping[header : header + len(token)] != token:
            raise ConnectorError("the peer's shared memory is not the one it means")
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            self._mapping, dtype=np.uint64, count=pool.num_blocks, offset=_table_offset(pool_bytes)
        )
        rows: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8, count=pool_bytes)
        self.rows = rows.reshape(-1, pool.num_layers, pool.layer_bytes)

    def check(self) -> None:
        """Raises ConnectorError if it cannot be used any more: beyond its end an access would kill this process."""
        if self.descriptor < 0:
            raise ConnectorError("the connector is closed")
        if os.fstat(self.descriptor).st_size != self._size:
            raise ConnectorError("the peer's shared memory has another size than before")

    def close(self) -> None:
        """Unmaps it with the last view. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.rows, self.generations, self._mapping


def reap_stale_segments() -> list[str]:
    """Removes segments whose owner is dead, whatever namespace it ran in; returns their names."""
    removed = []
    for path in _DIRECTORY.glob(PREFIX + "*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or another user's
        try:
            if _try_lock(descriptor, _OWNER_BYTE):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


def _create() -> tuple[str, int]:
    """(name, descriptor) of a new file whose owner byte this process has locked."""
    while True:
        name = PREFIX + secrets.token_hex(16)
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # A reaper may come between the two calls: then the file is gone or about to go.
        if _try_lock(descriptor, _OWNER_BYTE) and os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)


def _try_lock(descriptor: int, byte: int) -> bool:
    """Locks one byte for this open file, or says that another open file holds it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _unlock(descriptor: int, byte: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))


def _flock(kind: int, byte: int) -> bytes:
    """The kernel's `struct flock` for one byte counted from the start of the file; it need not exist."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)


def _transfer_byte(transfer_id: str) -> int:
    return 1 + (xxhash.xxh3_64_intdigest(transfer_id.encode()) >> 2)


def _header_offset(pool_bytes: int) -> int:
    return -(-pool_bytes // _PAGE) * _PAGE


def _table_offset(pool_bytes: int) -> int:
    return _header_offset(pool_bytes) + _PAGE
