"""torch.distributed: KV bytes over gloo between CPUs, over NCCL between CUDA devices; a process group for each pair.

Sealed headers come over a TCP stream, as for the `tcp` connector, whose books and rules hold here too; the payloads
come as tensors over a process group that the two make when the first frame is due, and again after it was lost. A
payload lands in memory beside the pool and is copied into its pages under the stream's lock, if its transfer is still
expected then: so a transfer is shut out whatever a hung group may do later. The lock is held until the device has done
the copy, which waits for no peer.
"""

import socket
import time
from collections.abc import Callable, Sequence

import torch
import xxhash

from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription, SenderIdentity
from kv_transfer.connectors.process_group import RECEIVER, SENDER, PairGroup, join, recorded
from kv_transfer.connectors.tcp import ReceivingStream, StreamExpected, TcpReceiver
from kv_transfer.connectors.tcp_sender import Frame, SendingStream, TcpSender
from kv_transfer.connectors.tcp_wire import Header, Seal
from kv_transfer.references import BlockRef

GLOO = Capabilities("gloo", cross_host=True, one_sided=False)
NCCL = Capabilities("nccl", cross_host=True, one_sided=False)
_FENCE_SECONDS = 0.05


class DistributedReceiver(TcpReceiver):
    """Receives into `tensor` [num_blocks, L, page, heads, 2 * dim], over gloo if it lies on CPU, else over NCCL."""

    def __init__(
        self, tensor: torch.Tensor, pool: PoolDescription, generation: Callable[[int], int], host: str, key: bytes
    ) -> None:
        self.capabilities = GLOO if tensor.is_cpu else NCCL
        _require(key)
        self._to_pass: dict[str, list[ReceivingStream]] = {}  # by transfer that is being shut out
        super().__init__(tensor, pool, generation, host, key, codecs=())

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """At once, unless a device is late with copies into pages: then it is to be asked again."""
        streams = self._shut_out(transfer_id)
        ends = time.monotonic() + _FENCE_SECONDS
        if late := [stream for stream in streams if not stream.pass_lock(max(0.0, ends - time.monotonic()))]:
            self._to_pass[transfer_id] = late
        return not late

    def _shut_out(self, transfer_id: str) -> list[ReceivingStream]:
        return [*self._to_pass.pop(transfer_id, ()), *super()._shut_out(transfer_id)]

    def _make_stream(self, connection: socket.socket) -> ReceivingStream:
        return ReceivingPair(self, connection)


class ReceivingPair(ReceivingStream):
    """One sender's stream and the group with it."""

    _has_met = False
    _group: PairGroup | None = None

    def _meet(self, seal: Seal) -> None:
        self._group = self._join(self._socket, seal)

    def _join(self, connection: socket.socket, seal: Seal) -> PairGroup:
        """Raises StreamLost."""
        return join(connection, seal, RECEIVER, self._receiver.pages.device)

    def _land(self, header: Header, expected: StreamExpected) -> None:
        receiver = self._receiver
        try:
            payload = self._receive(header.length)
        except OSError as error:
            receiver.fail(expected, f"the payload of a frame did not come: {error}")
            raise
        if payload.is_cpu and xxhash.xxh3_64_intdigest(payload.numpy().data) != header.checksum:
            reason = "the payload was damaged on the way"
            receiver.fail(expected, reason)
            receiver.refuse("checksum", reason)
            return
        with self._lock:
            if not expected.closed:
                self._scatter(header, payload)
                receiver.landed(expected, header)
                return
        receiver.refuse("unexpected", "the transfer ended in the middle of a frame")

    def _drop(self, num_bytes: int) -> None:
        self._receive(num_bytes)

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._group is not None:
            self._group.close()

    def _receive(self, num_bytes: int) -> torch.Tensor:
        """The next payload, in memory that is used again."""
        assert self._group is not None
        payload = self._group.buffer(num_bytes)
        with self._group.work():
            self._group.receive(payload)
        self._group.finish()
        return payload

    def _scatter(self, header: Header, payload: torch.Tensor) -> None:
        assert self._group is not None
        pages, blocks = self._receiver.pages, [ref.block_id for ref in header.blocks]
        rows, layers = payload.view(len(blocks), -1), slice(header.layer, header.layer + header.layers)
        if pages.is_cpu:  # copies by index are slower there
            for row, block in zip(rows.numpy(), blocks, strict=True):
                pages[block, layers].view(-1).numpy()[:] = row
            return
        with self._group.work():
            index = torch.tensor(blocks, device=pages.device)
            _words(pages[:, layers].flatten(1)).index_copy_(0, index, _words(rows))
            done = recorded(pages.device)
        # Whatever becomes of the peer: a copy that was begun must not be left when the lock goes. It waits for none.
        done.synchronize()


class SendingPair(SendingStream):
    """The stream to a receiver and the group with it."""

    _group: PairGroup | None = None

    def _prepare(self, frame: Frame) -> None:
        if self._group is None:
            assert self._socket is not None
            self._group = self._join(self._socket, frame.rows.device)

    def _join(self, connection: socket.socket, device: torch.device) -> PairGroup:
        """Raises StreamLost."""
        return join(connection, self._seal, SENDER, device)

    def _copy(self, frame: Frame) -> torch.Tensor:
        assert self._group is not None
        rows = _words(frame.rows)
        payload = self._group.buffer(len(frame.source_blocks) * frame.rows.shape[1])
        with self._group.work(frame.ready):
            index = torch.tensor(frame.source_blocks, device=rows.device)
            torch.index_select(rows, 0, index, out=_words(payload.view(len(index), -1)))
        self._group.finish()
        return payload

    def _sum(self, payload: torch.Tensor) -> int:
        return super()._sum(payload) if payload.is_cpu else 0

    def _ship(self, header: bytes, payload: torch.Tensor) -> None:
        assert self._group is not None
        self._send([memoryview(header)])
        with self._group.work():
            self._group.send(payload)
        self._group.finish()

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._group is not None:
            self._group.close()
            self._group = None


class DistributedSender(TcpSender):
    """Sends rows that lie on `device`. Raises ConnectorError as TcpSender does; a group is made with the first push."""

    _stream_type: type[SendingPair] = SendingPair

    def __init__(self, description: bytes, layout: str, key: bytes, device: torch.device) -> None:
        _require(key)
        self._device = device
        # On CPU one copies and sums while the other sends; kernels of two communicators would wait for each other.
        self._num_streams = 2 if device.type == "cpu" else 1
        self._frame_bytes = frame_bytes(device)
        super().__init__(description, layout, key)

    def push_layers(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Where there is one stream, in frames of all layers: each costs the devices' CPUs more than its bytes do."""
        push = self._queue if self._num_streams == 1 else super().push_layers
        return push(transfer_id, layers, source, source_blocks, blocks)

    def _ready(self, source: torch.Tensor) -> torch.cuda.Event | None:
        if source.device != self._device:
            raise ConnectorError(f"the KV cache lies on {source.device}, the connector is for {self._device}")
        return None if source.is_cpu else recorded(source.device)


def frame_bytes(device: torch.device) -> int:
    """Bytes that go together where a row is not more."""
    return (4 if device.type == "cpu" else 64) << 20


def _require(key: bytes) -> None:
    if not key:
        raise ConnectorError("what carries the bytes trusts whoever it is connected to, so a cluster key is needed")


def _words(rows: torch.Tensor) -> torch.Tensor:
    """[n, bytes], uint8, in the widest type that divides them: copied by index, each element is a step."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.stride(0) % 8 == 0 else rows
