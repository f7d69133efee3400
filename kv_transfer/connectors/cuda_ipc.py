"""One host, CUDA devices: the sender's kernels write into the receiver's pages, over NVLink or within one device.

The pool is memory of the receiver's device that the sender maps. Who may write what is decided as in shared memory
(`shared_memory`), by a segment that holds the table and no pool, and copies are seen out as `device_copies` says.

When a sender dies its lock goes with its files, and they are closed in no order to rely on: its device's may be the
last, and what it has queued may run until then. So a free lock shuts a transfer out only if the sender still lives, as
then it has left by itself, or if all its files are closed. Both sides must see each other's processes for that.
"""

from collections.abc import Sequence

import msgspec
import torch

from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription, SenderIdentity
from kv_transfer.connectors.cuda_memory import MappedMemory, MemoryHandle, export
from kv_transfer.connectors.device_copies import CopyingSender
from kv_transfer.connectors.shared_memory import SegmentDescription, SharedMemoryReceiver, SharedSegment
from kv_transfer.process_identity import Life, life, pid_namespace

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


class CudaIpcSender(CopyingSender):
    """Writes into the pool that `description` names, from caches on `device`. Raises ConnectorError."""

    description_type: type[SegmentDescription] = _Description
    _mapped: MappedMemory | None = None
    _sent_rows: tuple[list[int], list[int], torch.Tensor, torch.Tensor] | None = None  # of the last push

    def _reach(self, description: bytes) -> None:
        offer = msgspec.msgpack.decode(description, type=_Description)
        if not offer.pid_namespace or offer.pid_namespace != pid_namespace():
            raise ConnectorError(
                "the receiver could not see when this process dies: cuda_ipc needs workers of one PID namespace; run "
                "both in one container, let theirs share it, or use nccl"
            )
        pool = self.pool
        self._mapped = MappedMemory(offer.memory, pool.num_blocks * pool.block_bytes, self._device)
        self._compile(self._mapped.address)

    def _leave_memory(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

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

    def _copy(self, layers: range, source: torch.Tensor, source_blocks: Sequence[int], blocks: list[int]) -> None:
        """One launch for all rows."""
        from engine.kernels.copy_rows import copy_rows

        assert self._mapped is not None
        ours, theirs = self._rows_on_device(list(source_blocks), blocks)
        rows = source[:, layers.start : layers.stop].flatten(1).view(torch.uint8)
        copy_rows(
            rows, ours, self._mapped.address + layers.start * self.pool.layer_bytes, theirs, self.pool.block_bytes
        )

    def _rows_on_device(self, ours: list[int], theirs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk's layers have the same rows: they are sent once."""
        from engine.kernels.copy_rows import on_device

        if self._sent_rows is None or self._sent_rows[:2] != (ours, theirs):
            self._sent_rows = ours, theirs, *on_device([ours, theirs], self._device)
        return self._sent_rows[2:]
