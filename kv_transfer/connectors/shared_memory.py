"""Same host: the receiver's whole pool lies in /dev/shm, and the sender writes its pages in place. One copy, no socket.

The file holds the pool, then one page that names it, then the generation of each block. The sender maps the file,
checks that page against what it was told, and looks up generations before each write, so a stale reference is refused
at the source. What it cannot do is take a mapping back: a sender that was told to stop is believed when it says so, or
when its process is known to be dead.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.connectors.base import (
    Capabilities,
    ConnectorError,
    PoolDescription,
    ReceiverConnector,
    SenderConnector,
    SenderIdentity,
)
from kv_transfer.process_identity import boot_id, is_dead, start_ticks
from kv_transfer.references import BlockRef

CAPABILITIES = Capabilities("shared_memory", cross_host=False, one_sided=True)
PREFIX = "tandem-kv-"
_DIRECTORY = Path("/dev/shm")
_PAGE = mmap.PAGESIZE


class _Description(msgspec.Struct, frozen=True):
    pool: PoolDescription
    name: str
    token: bytes  # also stands in the segment: proves that both sides see the same memory
    boot_id: str
    size: int


class SharedSegment:
    """Memory of `pool_bytes` in /dev/shm under a random name, mode 0600, with a table of `num_blocks` generations."""

    def __init__(self, pool_bytes: int, num_blocks: int) -> None:
        self.pool_bytes = pool_bytes
        self.size = _table_offset(pool_bytes) + 8 * num_blocks
        free = os.statvfs(_DIRECTORY)
        if self.size > free.f_bavail * free.f_frsize:
            raise ConnectorError(
                f"the KV pool needs {self.size >> 20} MiB of /dev/shm and {free.f_bavail * free.f_frsize >> 20} MiB "
                "are free: enlarge it (docker: shm_size), lower --kv-memory, or use --connector zmq"
            )
        # The owner's pid and start time stand in the name, so that a later start can tell left-overs of the dead.
        self.name = f"{PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(32)
        descriptor = os.open(_DIRECTORY / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Takes the pages now: a full /dev/shm is an error here and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, self.size)
            self._mapping = mmap.mmap(descriptor, self.size)
        except OSError as error:
            os.unlink(_DIRECTORY / self.name)
            raise ConnectorError(f"/dev/shm has no {self.size >> 20} MiB for the KV pool: {error}") from error
        finally:
            os.close(descriptor)
        self._mapping[_header_offset(pool_bytes) : _header_offset(pool_bytes) + len(self.token)] = self.token
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            self._mapping, dtype=np.uint64, count=num_blocks, offset=_table_offset(pool_bytes)
        )

    @property
    def buffer(self) -> memoryview:
        """The pool's bytes."""
        return memoryview(self._mapping)[: self.pool_bytes]

    def unlink(self) -> None:
        """Removes the name; the memory goes with the last mapping."""
        (_DIRECTORY / self.name).unlink(missing_ok=True)


class SharedMemoryReceiver(ReceiverConnector):
    """Offers the pool in `segment`."""

    capabilities = CAPABILITIES

    def __init__(self, segment: SharedSegment, pool: PoolDescription) -> None:
        self._segment = segment
        self._pool = pool

    def describe(self) -> bytes:
        """Name, token and shape of the segment."""
        segment = self._segment
        return msgspec.msgpack.encode(_Description(self._pool, segment.name, segment.token, boot_id(), segment.size))

    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """Publishes the generations: senders refuse any other."""
        for ref in blocks:
            self._segment.generations[ref.block_id] = ref.generation

    def bytes_landed(self, transfer_id: str) -> int | None:
        """Unknown: the sender writes by itself."""
        return None

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Whether the sender's process is gone; nothing else stops it from writing."""
        return is_dead(sender)

    def finish(self, transfer_id: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Removes the segment."""
        self._segment.unlink()


class SharedMemorySender(SenderConnector):
    """Writes into the pool that `description` names. Raises ConnectorError if it is not the same memory."""

    def __init__(self, description: bytes, layout: str) -> None:
        try:
            offer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of shared memory: {error}") from error
        pool = offer.pool
        if pool.layout != layout:
            raise ConnectorError(f"the receiver's block layout is {pool.layout}, ours {layout}")
        pool_bytes = pool.num_blocks * pool.block_bytes
        expected = _table_offset(pool_bytes) + 8 * pool.num_blocks
        if (
            offer.boot_id != boot_id()
            or not offer.name.startswith(PREFIX)
            or "/" in offer.name
            or offer.size != expected
        ):
            raise ConnectorError("the receiver's memory is not on this host")
        try:
            descriptor = os.open(_DIRECTORY / offer.name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ConnectorError(f"the receiver's shared memory cannot be opened: {error.strerror}") from error
        try:
            if os.fstat(descriptor).st_size != expected:
                raise ConnectorError("the receiver's shared memory has another size than it says")
            self._mapping = mmap.mmap(descriptor, expected)
        finally:
            os.close(descriptor)
        header = _header_offset(pool_bytes)
        if self._mapping[header : header + len(offer.token)] != offer.token:
            raise ConnectorError("the receiver's shared memory is not the one it means")
        self._pool = pool
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(
            self._mapping, dtype=np.uint64, count=pool.num_blocks, offset=_table_offset(pool_bytes)
        )
        rows = torch.frombuffer(self._mapping, dtype=torch.uint8, count=pool_bytes)
        self._rows = rows.view(pool.num_blocks, pool.block_bytes // pool.layer_bytes, pool.layer_bytes)

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Copies the rows in one go."""
        for ref in blocks:
            if ref.incarnation != self._pool.incarnation or not 0 <= ref.block_id < self._pool.num_blocks:
                raise ConnectorError(f"block {ref.block_id} is not in the receiver's pool")
            if self._generations[ref.block_id] != ref.generation:
                raise ConnectorError(f"block {ref.block_id} of the receiver was handed out again")
        rows = source[:, layer].flatten(1)  # a view: the layer of a block is contiguous
        destination = self._rows.view(source.dtype)[:, layer]
        destination[[ref.block_id for ref in blocks]] = rows[list(source_blocks)]
        return len(blocks) * self._pool.layer_bytes

    def flush(self, transfer_id: str) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Drops the mapping with its last view."""
        del self._rows, self._generations


def reap_stale_segments() -> list[str]:
    """Removes segments whose owner is dead; returns their names."""
    removed = []
    for path in _DIRECTORY.glob(PREFIX + "*"):
        owner = path.name.removeprefix(PREFIX).split("-")
        if len(owner) == 3 and owner[0].isdigit() and str(start_ticks(int(owner[0]))) != owner[1]:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _header_offset(pool_bytes: int) -> int:
    return -(-pool_bytes // _PAGE) * _PAGE


def _table_offset(pool_bytes: int) -> int:
    return _header_offset(pool_bytes) + _PAGE
