"""One host, CUDA devices: the sender's kernels write into the receiver's pages, over NVLink or within one device.

The pool is memory of the receiver's device that the sender maps. Who may write what is decided as in shared memory
(`shared_memory`), by a segment that holds the table and no pool. Copies run on a stream of their own, behind the layer
that they copy, so the sender's lock on a transfer is held from its first push until `flush` or `stop` has seen the last
copy end.

When a sender dies its lock goes, and no copy of it may be left: the kernel closes a dead process's files in the order
of their numbers, and those of the device, which were opened first, take the device's work with them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription
from kv_transfer.connectors.cuda_memory import MappedMemory, MemoryHandle, export
from kv_transfer.connectors.shared_memory import (
    SegmentDescription,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedSegment,
)
from kv_transfer.references import BlockRef

CAPABILITIES = Capabilities("cuda_ipc", cross_host=False, one_sided=True)


class _Description(SegmentDescription, frozen=True, kw_only=True):
    memory: MemoryHandle


class CudaIpcReceiver(SharedMemoryReceiver):
    """Offers the pool `tensor` [num_blocks, L, page, heads, 2 * dim] on a CUDA device. Raises ConnectorError."""

    capabilities = CAPABILITIES

    def __init__(self, tensor: torch.Tensor, pool: PoolDescription) -> None:
        memory = export(tensor)
        super().__init__(SharedSegment(0, pool.num_blocks), pool)
        self._memory = memory

    def describe(self) -> bytes:
        """The segment, and the pool's memory."""
        return msgspec.msgpack.encode(_Description(*msgspec.structs.astuple(self.segment), memory=self._memory))


class CudaIpcSender(SharedMemorySender):
    """Writes into the pool that `description` names, from caches on `device`. Raises ConnectorError."""

    description_type: type[SegmentDescription] = _Description

    def __init__(self, description: bytes, layout: str, device: torch.device) -> None:
        super().__init__(description, layout)
        self._device = device
        self._ends: dict[str, torch.cuda.Event] = {}  # of the last copy of each transfer under way
        self._sent_rows: tuple[list[int], list[int], torch.Tensor, torch.Tensor] | None = None  # of the last push
        self._stream: Any = None
        try:
            if device.type != "cuda":
                raise ConnectorError("the KV cache here does not lie on a CUDA device")
            self._mapped = MappedMemory(msgspec.msgpack.decode(description, type=_Description).memory, device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        except ConnectorError:
            super().close()
            raise

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Starts the copy of the rows, behind what the device was given so far."""
        from engine.kernels.copy_rows import copy_rows

        if source.device != self._device:
            raise ConnectorError(f"the KV cache lies on {source.device}, the connector is for {self._device}")
        destination = self.admit(transfer_id, layer, source, source_blocks, blocks)
        pool = self.pool
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            ours, theirs = self._rows_on_device(list(source_blocks), destination)
            rows = source[:, layer].flatten(1).view(torch.uint8)
            address = self._mapped.address + layer * pool.layer_bytes
            copy_rows(rows, ours, address, theirs, pool.block_bytes)
            source.record_stream(self._stream)  # pages that were packed for this push live until then
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(self._stream)
            self._ends[transfer_id] = end
        return self.count(len(blocks))

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
        """Drops the mappings."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
            self._mapped.close()
        super().close()

    def _end(self, transfer_id: str) -> None:
        if (end := self._ends.pop(transfer_id, None)) is not None:
            end.synchronize()
        self.leave(transfer_id)

    def _rows_on_device(self, ours: list[int], theirs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk's layers have the same rows: they are sent once."""
        from engine.kernels.copy_rows import on_device

        if self._sent_rows is None or self._sent_rows[:2] != (ours, theirs):
            self._sent_rows = ours, theirs, on_device(ours, self._device), on_device(theirs, self._device)
        return self._sent_rows[2:]
