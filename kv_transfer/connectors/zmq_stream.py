"""Any host: KV bytes as ZMQ messages, written into the pages by the receiver itself.

A message is a msgpack header and one payload. The header names the transfer, the layer and the blocks by reference; the
receiver resolves them, and drops and counts whatever is not expected, out of bounds, stale or damaged. Fencing is
immediate: a transfer that is not expected is not written.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
import torch
import xxhash
import zmq

from kv_transfer.connectors.base import (
    Capabilities,
    ConnectorError,
    PoolDescription,
    ReceiverConnector,
    SenderConnector,
    SenderIdentity,
)
from kv_transfer.references import BlockRef, StaleReference, check

log = structlog.get_logger()

CAPABILITIES = Capabilities("zmq", cross_host=True, one_sided=False)
_FORMAT = 1
_MAX_HEADER = 1 << 20
_QUEUED_MESSAGES = 256

# Sets CURVE and the like on a socket; `server` is the binding side.
Secure = Callable[[zmq.Socket[bytes], bool], None]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    format: int
    transfer_id: str
    layer: int
    blocks: list[BlockRef]
    checksum: int  # xxh3_64 of the payload


class _Description(msgspec.Struct, frozen=True):
    pool: PoolDescription
    address: str


@dataclass
class DroppedFrames:
    """What the receiver refused, by kind."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str) -> None:
        """Counts one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1


@dataclass(slots=True)
class _Expected:
    blocks: frozenset[int]
    landed: int = 0


class ZmqReceiver(ReceiverConnector):
    """Binds a PULL socket on `host`; writes what comes into `tensor` [num_blocks, L, page, heads, 2 * dim]."""

    capabilities = CAPABILITIES

    def __init__(
        self, tensor: torch.Tensor, pool: PoolDescription, generation: Callable[[int], int], host: str, secure: Secure
    ) -> None:
        self.dropped = DroppedFrames()
        self._pool = pool
        self._generation = generation
        self._rows = tensor.flatten(2).view(torch.uint8)  # [num_blocks, L, layer_bytes]
        self._expected: dict[str, _Expected] = {}
        self._lock = threading.Lock()  # held while a payload is written: after fence() returns, none is
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        secure(self._socket, True)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_HEADER + pool.num_blocks * pool.layer_bytes)
        self._address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-zmq", daemon=True)
        self._thread.start()

    def describe(self) -> bytes:
        """Address and shape of the pool."""
        return msgspec.msgpack.encode(_Description(self._pool, self._address))

    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """Lets this transfer write these blocks."""
        with self._lock:
            self._expected[transfer_id] = _Expected(frozenset(ref.block_id for ref in blocks))

    def bytes_landed(self, transfer_id: str) -> int | None:
        """Bytes written so far."""
        expected = self._expected.get(transfer_id)
        return expected.landed if expected else 0

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Always at once."""
        self.finish(transfer_id)
        return True

    def finish(self, transfer_id: str) -> None:
        """Writes no more of this transfer."""
        with self._lock:
            self._expected.pop(transfer_id, None)

    def close(self) -> None:
        """Ends the thread and closes the socket."""
        self._closing.set()
        self._thread.join(timeout=2)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Header)
        while not self._closing.is_set():
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart(copy=False)
            try:
                self._receive(decoder, frames)
            except StaleReference as error:
                self.dropped.add(error.kind)
            except (msgspec.MsgspecError, ConnectorError, OverflowError) as error:
                self.dropped.add("malformed")
                log.warning("malformed KV frame dropped", error=str(error))

    def _receive(self, decoder: "msgspec.msgpack.Decoder[_Header]", frames: list[zmq.Frame]) -> None:
        if len(frames) != 2 or len(frames[0]) > _MAX_HEADER:
            raise ConnectorError("a KV message has a header and one payload")
        header = decoder.decode(frames[0].buffer)
        payload = frames[1].buffer
        if header.format != _FORMAT or not 0 <= header.layer < self._rows.shape[1] or not header.blocks:
            raise ConnectorError("unknown format, layer out of range, or no blocks")
        if len(payload) != len(header.blocks) * self._pool.layer_bytes:
            raise ConnectorError("the payload has another length than its blocks")
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            self.dropped.add("checksum")
            return
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(len(header.blocks), -1)
        with self._lock:
            expected = self._expected.get(header.transfer_id)
            if expected is None:
                self.dropped.add("unexpected")
                return
            for ref in header.blocks:
                check(ref, self._pool.incarnation, self._pool.num_blocks, self._generation)
                if ref.block_id not in expected.blocks:
                    raise StaleReference("foreign", f"block {ref.block_id} is not of this transfer")
            self._rows[[ref.block_id for ref in header.blocks], header.layer] = data
            expected.landed += len(payload)


class ZmqSender(SenderConnector):
    """Sends from a thread of its own; `push` copies the rows and returns. Raises ConnectorError on another layout."""

    def __init__(self, description: bytes, layout: str, secure: Secure) -> None:
        try:
            offer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of a ZMQ pool: {error}") from error
        if offer.pool.layout != layout:
            raise ConnectorError(f"the receiver's block layout is {offer.pool.layout}, ours {layout}")
        self._pool = offer.pool
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        secure(self._socket, False)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._socket.connect(offer.address)
        self._queue: queue.Queue[tuple[bytes, bytearray] | threading.Event | None] = queue.Queue(_QUEUED_MESSAGES)
        self._thread = threading.Thread(target=self._run, name="kv-zmq-send", daemon=True)
        self._thread.start()

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Queues one message; blocks only while the queue is full."""
        rows = source[:, layer].flatten(1)[list(source_blocks)].view(torch.uint8)
        payload = bytearray(rows.numpy().data.cast("B"))
        header = _Header(_FORMAT, transfer_id, layer, list(blocks), xxhash.xxh3_64_intdigest(payload))
        try:
            self._queue.put((msgspec.msgpack.encode(header), payload), timeout=5)
        except queue.Full:
            raise ConnectorError("the receiver does not take KV bytes") from None
        return len(payload)

    def flush(self, transfer_id: str) -> None:
        """Waits until everything queued so far is with ZMQ; the rows were copied by `push`."""
        marker = threading.Event()
        self._queue.put(marker)
        if not marker.wait(timeout=10):
            raise ConnectorError("the receiver does not take KV bytes")

    def close(self) -> None:
        """Drops what is queued and closes the socket."""
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._queue.put(None)
        self._thread.join(timeout=2)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._socket.send_multipart(item, copy=False)
            except zmq.ZMQError:
                return  # closed
