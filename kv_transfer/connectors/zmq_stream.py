"""Any host: KV bytes as ZMQ messages, written into the pages by the receiver itself.

A message is a msgpack header and one payload. The header names the transfer, the layer and the blocks by reference; the
receiver resolves them, and drops and counts whatever is not expected, out of bounds, stale, repeated or damaged. An
expected transfer that loses a message this way has failed, at once. Fencing is immediate: a transfer that is not
expected is not written.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
import torch
import xxhash
import zmq

from kv_transfer.connectors.base import (
    Capabilities,
    ConnectorCounters,
    ConnectorError,
    PoolDescription,
    SenderConnector,
)
from kv_transfer.connectors.frames import Expected, FrameReceiver, Refused, check_destination
from kv_transfer.references import BlockRef, StaleReference

log = structlog.get_logger()

CAPABILITIES = Capabilities("zmq", cross_host=True, one_sided=False)
_FORMAT = 1
_MAX_HEADER = 1 << 20
_QUEUED_MESSAGES = 16  # inside ZMQ, each side
_POLL_MS = 50
_STUCK_SECONDS = 5.0  # without one message going out

# Sets CURVE and the like on a socket; `server` is the binding side.
Secure = Callable[[zmq.Socket[bytes], bool], None]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    format: int
    transfer_id: str
    sequence: int  # of the message within its transfer, from 0
    layer: int
    blocks: list[BlockRef]
    checksum: int  # xxh3_64 of the payload


class _Description(msgspec.Struct, frozen=True):
    pool: PoolDescription
    address: str


@dataclass(slots=True, eq=False)
class _Expected(Expected):
    next_sequence: int = 0


class ZmqReceiver(FrameReceiver):
    """Binds a PULL socket on `host`; writes what comes into `tensor` [num_blocks, L, page, heads, 2 * dim].

    `host` is an address that senders can reach. `generation` gives a block's present generation; any thread may ask.
    """

    capabilities = CAPABILITIES

    def __init__(
        self, tensor: torch.Tensor, pool: PoolDescription, generation: Callable[[int], int], host: str, secure: Secure
    ) -> None:
        self.counters = ConnectorCounters()
        self._pool = pool
        self._generation = generation
        # [num_blocks, L, layer_bytes], a view
        self._rows: npt.NDArray[np.uint8] = tensor.flatten(2).view(torch.uint8).numpy()
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

    def finish(self, transfer_id: str) -> None:
        """Writes no more of this transfer."""
        with self._lock:
            self._expected.pop(transfer_id, None)

    def close(self) -> None:
        """Ends the thread and closes the socket."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Header)
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart(copy=False)
            try:
                self._receive(_parse(decoder, frames), frames[1].buffer)
            except (StaleReference, Refused) as error:
                self.counters.refuse(error.kind)
                log.warning("KV message dropped", kind=error.kind, reason=str(error))

    def _receive(self, header: _Header, payload: memoryview) -> None:
        expected = self._expected.get(header.transfer_id)
        if expected is None or expected.failure is not None:
            raise Refused("unexpected", "the transfer is not under way here")
        if header.sequence < expected.next_sequence:
            raise Refused("repeated", "the message was received before")
        try:
            if header.sequence > expected.next_sequence:
                raise Refused("lost", "messages before it were lost")
            self._check(header, payload, expected)
        except (StaleReference, Refused) as error:
            expected.failure = str(error)
            raise
        data = np.frombuffer(payload, dtype=np.uint8).reshape(len(header.blocks), self._pool.layer_bytes)
        with self._lock:
            if self._expected.get(header.transfer_id) is not expected:
                raise Refused("unexpected", "the transfer is not under way here")
            self._rows[[ref.block_id for ref in header.blocks], header.layer] = data
            expected.next_sequence += 1
            expected.landed += len(payload)
            self.counters.bytes += len(payload)

    def _check(self, header: _Header, payload: memoryview, expected: _Expected) -> None:
        check_destination(self._pool, self._generation, expected.blocks, header.layer, header.blocks, len(payload))
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            raise Refused("checksum", "the payload was damaged on the way")


def _parse(decoder: "msgspec.msgpack.Decoder[_Header]", frames: list[zmq.Frame]) -> _Header:
    if len(frames) != 2 or len(frames[0]) > _MAX_HEADER:
        raise Refused("malformed", "a KV message has a header and one payload")
    try:
        header = decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("malformed", str(error)) from error
    if header.format != _FORMAT:
        raise Refused("malformed", f"format {header.format} is not known here, only {_FORMAT}")
    return header


@dataclass(slots=True)
class _Push:
    transfer_id: str
    layer: int
    source: torch.Tensor
    source_blocks: list[int]
    blocks: list[BlockRef]
    dropped: bool = False


class ZmqSender(SenderConnector):
    """Reads and sends the rows on a thread of its own. Raises ConnectorError on a pool of another layout.

    What is queued are block ids, not bytes: the source blocks are held until the transfer ends anyway.
    """

    def __init__(self, description: bytes, layout: str, secure: Secure) -> None:
        try:
            offer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of a ZMQ pool: {error}") from error
        offer.pool.require_layout(layout)
        self.counters = ConnectorCounters()
        self._pool = offer.pool
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        secure(self._socket, False)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        try:
            if not offer.address.startswith("tcp://"):
                raise ConnectorError(f"the receiver's address {offer.address!r} does not start with tcp://")
            self._socket.connect(offer.address)
        except (zmq.ZMQError, ConnectorError) as error:
            self._context.destroy(linger=0)
            raise ConnectorError(f"cannot connect to {offer.address!r}: {error}") from error
        self._changed = threading.Condition()
        self._queue: deque[_Push] = deque()
        self._current: _Push | None = None
        self._sequences: dict[str, int] = {}  # of the next message of each transfer
        self._num_sent = 0
        self._closing = False
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
        """Queues one message."""
        self._pool.check_push(range(layer, layer + 1), source, source_blocks, blocks)
        with self._changed:
            if self._closing:
                raise ConnectorError("the connector is closed")
            self._queue.append(_Push(transfer_id, layer, source, list(source_blocks), list(blocks)))
            self._changed.notify_all()
        return len(blocks) * self._pool.layer_bytes

    def flush(self, transfer_id: str) -> None:
        """Waits until everything pushed so far is with ZMQ, as long as messages go out."""
        with self._changed:
            sent, patience_ends = self._num_sent, time.monotonic() + _STUCK_SECONDS
            while self._is_pending(transfer_id):
                if self._num_sent != sent:
                    sent, patience_ends = self._num_sent, time.monotonic() + _STUCK_SECONDS
                left = patience_ends - time.monotonic()
                if self._closing or left <= 0:
                    raise ConnectorError("the receiver does not take KV bytes")
                self._changed.wait(left)
            self._sequences.pop(transfer_id, None)

    def stop(self, transfer_id: str) -> None:
        """Drops what is queued; a message that waits for room in ZMQ is given up, too."""
        with self._changed:
            self._queue = deque(push for push in self._queue if push.transfer_id != transfer_id)
            current = self._current
            if current is not None and current.transfer_id == transfer_id:
                current.dropped = True
                self._changed.wait_for(lambda: self._current is not current)
            self._sequences.pop(transfer_id, None)

    def close(self) -> None:
        """Drops what is queued and closes the socket."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()
        self._context.destroy(linger=0)

    def _is_pending(self, transfer_id: str) -> bool:
        current = self._current
        return (current is not None and current.transfer_id == transfer_id) or any(
            push.transfer_id == transfer_id for push in self._queue
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._queue)
                if self._closing:
                    return
                push = self._current = self._queue.popleft()
                sequence = self._sequences.get(push.transfer_id, 0)
                self._sequences[push.transfer_id] = sequence + 1
            rows = push.source[:, push.layer].flatten(1)[push.source_blocks].view(torch.uint8)
            payload = rows.numpy().data.cast("B")
            checksum = xxhash.xxh3_64_intdigest(payload)
            header = _Header(_FORMAT, push.transfer_id, sequence, push.layer, push.blocks, checksum)
            encoded = msgspec.msgpack.encode(header)
            while not push.dropped and not self._closing:
                self._socket.poll(_POLL_MS, zmq.POLLOUT)
                try:
                    # Must not block: the receiver may have gone since the poll, and nobody could stop this thread.
                    self._socket.send_multipart((encoded, payload), zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    continue
                self.counters.bytes += len(payload)
                self._num_sent += 1
                break
