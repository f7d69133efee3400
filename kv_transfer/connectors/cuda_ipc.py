"""One host, CUDA devices: the sender's kernels write into the receiver's pages, over NVLink or within one device.

The pool is memory of the receiver's device that the sender maps. Who may write what is decided as in shared memory
(`shared_memory`), by a segment that holds the table and no pool. Copies run on a stream of their own, behind the layer
that they copy, so the sender's lock on a transfer is held from its first push until `flush` or `stop` has seen the last
copy end.

When a sender dies its lock goes with its files, and they are closed in no order to rely on: its device's may be the
last, and what it has queued may run until then. So a free lock shuts a transfer out only if the sender still lives, as
then it has left by itself, or if all its files are closed. Both sides must see each other's processes for that.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription, SenderIdentity
from kv_transfer.connectors.cuda_memory import MappedMemory, MemoryHandle, export
from kv_transfer.connectors.shared_memory import (
    SegmentDescription,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedSegment,
)
from kv_transfer.process_identity import Life, life, pid_namespace
from kv_transfer.references import BlockRef

CAPABILITIES = Capabilities("cuda_ipc", cross_host=False, one_sided=True)
_ALIGNED = 16  # bytes; kernels are made anew for addresses that are not


class _Description(SegmentDescription, frozen=True, kw_only=True):
    memory: MemoryHandle
    pid_namespace: str


class CudaIpcReceiver(SharedMemoryReceiver):
    """Offers the pool `tensor` [num_blocks, L, page, heads, 2 * dim] on a CUDA device. Raises ConnectorError."""

    capabilities = CAPABILITIES

    def __init__(self, tensor: torch.Tensor, pool: PoolDescription) -> None:
        memory = export(tensor)
        super().__init__(SharedSegment(0, pool.num_blocks), pool)
        self._memory = memory

    def describe(self) -> bytes:
        """The segment, and the pool's memory."""
        segment = msgspec.structs.astuple(self.segment)
        description = _Description(*segment, memory=self._memory, pid_namespace=pid_namespace())
        return msgspec.msgpack.encode(description)

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Strikes the blocks out; whether no copy of the transfer is queued."""
        # In this order: a sender that lives after its lock was seen free has not lost it by dying, but has left.
        return super().fence(transfer_id, sender) and life(sender) is not Life.ENDS


class CudaIpcSender(SharedMemorySender):
    """Writes into the pool that `description` names, from caches on `device`. Raises ConnectorError."""

    description_type: type[SegmentDescription] = _Description

    def __init__(self, description: bytes, layout: str, device: torch.device) -> None:
        super().__init__(description, layout)
        self._device = device
        self._lock = threading.Lock()  # over what follows and the sender's own lock on a transfer; held for moments
        self._ends: dict[str, torch.cuda.Event] = {}  # of the last copy of each transfer under way
        self._sent_rows: tuple[list[int], list[int], torch.Tensor, torch.Tensor] | None = None  # of the last push
        self._stream: Any = None
        self._mapped: MappedMemory | None = None
        try:
            self._open(msgspec.msgpack.decode(description, type=_Description))
        except BaseException as error:
            with contextlib.suppress(ConnectorError, RuntimeError):
                self.close()
            if isinstance(error, ConnectorError) or not isinstance(error, Exception):
                raise
            raise ConnectorError(f"copies between CUDA devices do not work here: {error}") from error

    def _open(self, offer: _Description) -> None:
        if self._device.type != "cuda":
            raise ConnectorError("the KV cache here does not lie on a CUDA device")
        if not offer.pid_namespace or offer.pid_namespace != pid_namespace():
            raise ConnectorError(
                "the receiver could not see when this process dies: cuda_ipc needs workers of one PID namespace; run "
                "both in one container, let theirs share it, or use nccl"
            )
        pool = self.pool
        self._mapped = MappedMemory(offer.memory, pool.num_blocks * pool.block_bytes, self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._compile(self._mapped.address)

    def _compile(self, address: int) -> None:
        """Runs the kernel once in each form that pushes take: to make one takes long, and they are the engine's time.

        The forms differ by strides, those of a cache and of packed pages, and by how a layer's address is aligned.
        """
        from engine.kernels.copy_rows import copy_rows

        size = self.pool.layer_bytes
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            source, target = (
                torch.zeros(size + _ALIGNED, dtype=torch.uint8, device=self._device) for _ in ("read", "written")
            )
            row = torch.zeros(1, dtype=torch.int64, device=self._device)
            for skew in {layer * size % _ALIGNED for layer in range(self.pool.num_layers)}:
                place = target.data_ptr() + (address + skew) % _ALIGNED
                for stride, first in ((self.pool.block_bytes, skew), (size, 0)):
                    copy_rows(source.as_strided((1, size), (stride, 1), first), row, place, row, self.pool.block_bytes)
            self._stream.synchronize()

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Starts the copy of the rows, behind what the device was given so far."""
        return self.push_layers(transfer_id, range(layer, layer + 1), source, source_blocks, blocks)

    def push_layers(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """The same for several: one copy, as the layers of a block lie one after another."""
        from engine.kernels.copy_rows import copy_rows

        if source.device != self._device:
            raise ConnectorError(f"the KV cache lies on {source.device}, the connector is for {self._device}")
        pool = self.pool
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                destination = self.admit(transfer_id, layers, source, source_blocks, blocks)
            except ConnectorError:
                if transfer_id not in self._ends:
                    self.leave(transfer_id)
                raise
            assert self._mapped is not None
            self._stream.wait_event(computed)
            ours, theirs = self._rows_on_device(list(source_blocks), destination)
            rows = source[:, layers.start : layers.stop].flatten(1).view(torch.uint8)
            address = self._mapped.address + layers.start * pool.layer_bytes
            copy_rows(rows, ours, address, theirs, pool.block_bytes)
            source.record_stream(self._stream)  # pages that were packed for this push live until then
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(self._stream)
            self._ends[transfer_id] = end
        return self.count(len(layers) * len(blocks))

    def flush(self, transfer_id: str) -> None:
        """Waits for the last copy. Raises ConnectorError if the device failed."""
        try:
            self._end(transfer_id)
        except RuntimeError as error:
            raise ConnectorError(f"the device failed: {error}") from error

    def stop(self, transfer_id: str) -> None:
        """Copies take microseconds: they are seen out."""
        try:
            self._end(transfer_id)
        except RuntimeError:
            return  # a device that failed writes nothing any more, and its process ends

    def close(self) -> None:
        """Drops the mappings, all of them even if one fails. Raises ConnectorError or RuntimeError then."""
        stream, self._stream = self._stream, None
        mapped, self._mapped = self._mapped, None
        try:
            if stream is not None:
                stream.synchronize()
        finally:
            try:
                if mapped is not None:
                    mapped.close()
            finally:
                super().close()

    def _end(self, transfer_id: str) -> None:
        """Leaves once the last copy has ended, whoever else waits for the same."""
        while True:
            end = self._ends.get(transfer_id)
            if end is not None:
                end.synchronize()
            with self._lock:
                if self._ends.get(transfer_id) is end:  # else it was pushed again, or somebody has left already
                    self._ends.pop(transfer_id, None)
                    self.leave(transfer_id)
                    return

    def _rows_on_device(self, ours: list[int], theirs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk's layers have the same rows: they are sent once."""
        from engine.kernels.copy_rows import on_device

        if self._sent_rows is None or self._sent_rows[:2] != (ours, theirs):
            self._sent_rows = ours, theirs, *on_device([ours, theirs], self._device)
        return self._sent_rows[2:]
