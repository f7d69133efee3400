"""The sending side of KV bytes over TCP: see `tcp` for the receiving one.

The rows of a push are spread over the streams by their block and layer, so that what is pushed twice arrives in order.
A stream copies the rows of a frame before it sums and sends them: they may change meanwhile, and are free once copied.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash

from kv_transfer.connectors.base import ConnectorCounters, ConnectorError, SenderConnector
from kv_transfer.connectors.codec import CODECS
from kv_transfer.connectors.codec_choice import CodecChoice, Sent, sent_on
from kv_transfer.connectors.tcp import TcpDescription, is_loopback
from kv_transfer.connectors.tcp_wire import (
    FORMAT,
    MAX_BLOCKS,
    STUCK_SECONDS,
    Header,
    Seal,
    StreamLost,
    cut,
    greet_receiver,
    tune,
)
from kv_transfer.references import BlockRef

NUM_STREAMS = 4
_CONNECT_SECONDS = 1.0  # for all streams: time is left to choose another connector
_RUN = 16  # blocks with neighbouring ids that go together


@dataclass(slots=True)
class Frame:
    """Rows of some layers that go out together."""

    transfer_id: str
    layers: range
    rows: torch.Tensor  # [num_blocks, bytes of the layers] of the source, a view
    source_blocks: list[int]
    blocks: list[BlockRef]
    codec: int  # for words of their type
    ready: torch.cuda.Event | None = None  # when the rows are computed; None on CPU: they are
    dropped: bool = False


class SendingStream:
    """One connection and the thread that sends on it; connects again after a loss, for transfers that come then."""

    def __init__(
        self,
        number: int,
        offer: TcpDescription,
        key: bytes,
        choice: CodecChoice,
        on_sent: Callable[[int], None],
        deadline: float,
    ) -> None:
        self._number = number
        self._offer = offer
        self._key = key
        self._choice = choice
        self._on_sent = on_sent
        self._changed = threading.Condition()
        self._queue: deque[Frame] = deque()
        self._current: Frame | None = None
        self._copying = False  # the rows of the current frame
        self._sequences: dict[str, int] = {}  # of the next frame of each transfer
        self._failed: dict[str, str] = {}  # why transfers lost frames here
        self._closing = False
        self._socket: socket.socket | None = None
        self._sent: Sent = (0, 0.0)  # on it, when last asked
        self._seal = self._connect(deadline)
        self._thread = threading.Thread(target=self._run, name="kv-tcp-send", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Queues a frame. Raises ConnectorError if its transfer has lost one."""
        with self._changed:
            if self._closing:
                raise ConnectorError("the connector is closed")
            self._raise_failure(frame.transfer_id)
            self._queue.append(frame)
            self._changed.notify_all()

    def flush(self, transfer_id: str) -> None:
        """Waits until the transfer's frames are out. Raises ConnectorError if one is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self._is_pending(transfer_id))
            self._raise_failure(transfer_id)
            if self._is_pending(transfer_id):
                raise ConnectorError("the connector is closed")
            self._sequences.pop(transfer_id, None)

    def stop(self, transfer_id: str) -> None:
        """Drops the transfer's frames and forgets it."""
        with self._changed:
            self._queue = deque(frame for frame in self._queue if frame.transfer_id != transfer_id)
            current = self._current
            if current is not None and current.transfer_id == transfer_id:
                current.dropped = True
                self._changed.wait_for(lambda: not self._copying or self._current is not current)
            self._sequences.pop(transfer_id, None)
            self._failed.pop(transfer_id, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and the connection. Idempotent."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            if self._socket is not None:
                cut(self._socket)
            self._changed.notify_all()
        self._thread.join()

    def sent(self) -> Sent:
        """What has gone out on the connection since the last call."""
        with self._changed:
            if self._socket is None:
                return 0, 0.0
            before, self._sent = self._sent, sent_on(self._socket)
            return max(0, self._sent[0] - before[0]), max(0.0, self._sent[1] - before[1])

    def _raise_failure(self, transfer_id: str) -> None:
        if reason := self._failed.get(transfer_id):
            raise ConnectorError(f"the receiver does not take KV bytes: {reason}")

    def _is_pending(self, transfer_id: str) -> bool:
        current = self._current
        return (current is not None and current.transfer_id == transfer_id) or any(
            frame.transfer_id == transfer_id for frame in self._queue
        )

    def _run(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._send_frame(frame)
            except Exception as error:  # also what torch and a device raise: those who wait for this thread must hear
                self._lose(frame, str(error) or repr(error))
        self._disconnect()

    def _next(self) -> Frame | None:
        """The next frame, on a stream that stands; None: closing."""
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._queue)
                if self._closing:
                    return None
                frame = self._current = self._queue.popleft()
                if self._socket is not None and _ended(self._socket):
                    self._break("the receiver ended the stream")
                    if frame.transfer_id in self._failed:
                        continue
            if self._socket is not None:
                return frame
            try:
                self._seal = self._connect(time.monotonic() + _CONNECT_SECONDS)
            except OSError as error:
                self._lose(frame, str(error))
            else:
                return frame

    def _send_frame(self, frame: Frame) -> None:
        self._prepare(frame)
        sequence = self._next_sequence(frame)
        if sequence is None:
            return
        try:
            payload = self._copy(frame)
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        length, checksum = payload.numel(), self._sum(payload)
        packed = self._choice.pack(payload.numpy(), frame.codec) if payload.is_cpu else None
        header = Header(
            FORMAT,
            frame.transfer_id,
            self._number,
            sequence,
            frame.layers.start,
            frame.blocks,
            length,
            checksum,
            len(frame.layers),
            frame.codec if packed else 0,
            sum(map(len, packed or ())),
        )
        if packed:
            self._send([memoryview(self._seal.close(header)), *packed])
        else:
            self._ship(self._seal.close(header), payload)
        self._on_sent(length)

    def _next_sequence(self, frame: Frame) -> int | None:
        """Of the frame in its transfer, whose rows are read from now on; None: it is not wanted any more."""
        with self._changed:
            if frame.dropped:
                return None
            sequence = self._sequences.get(frame.transfer_id, 0)
            self._sequences[frame.transfer_id] = sequence + 1
            self._copying = True
            return sequence

    def _prepare(self, frame: Frame) -> None:
        """Before the first frame on a connection: what it needs. Raises OSError."""

    def _copy(self, frame: Frame) -> torch.Tensor:
        """The payload [blocks * bytes of the layers], uint8."""
        rows = frame.rows.numpy()
        payload = np.empty((len(frame.blocks), rows.shape[1]), np.uint8)
        for place, block in enumerate(frame.source_blocks):
            payload[place] = rows[block]
        return torch.from_numpy(payload).view(-1)

    def _sum(self, payload: torch.Tensor) -> int:
        return xxhash.xxh3_64_intdigest(payload.numpy().data)

    def _ship(self, header: bytes, payload: torch.Tensor) -> None:
        """Sends a frame. Raises OSError."""
        self._send([memoryview(header), payload.numpy().data])

    def _send(self, views: list[memoryview]) -> None:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        acked, _ = sent_on(self._socket)
        while views:
            try:
                sent = self._socket.sendmsg(views)
            except BlockingIOError:
                if not poll.poll(STUCK_SECONDS * 1000):  # on a slow link that is shared, a full buffer may take longer
                    before, (acked, _) = acked, sent_on(self._socket)
                    if acked == before:
                        raise StreamLost(f"not one byte went out in {STUCK_SECONDS:g} s") from None
                continue
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _connect(self, deadline: float) -> Seal:
        offer = self._offer
        connection = socket.create_connection((offer.host, offer.port), max(0.01, deadline - time.monotonic()))
        try:
            tune(connection)
            seal = greet_receiver(connection, self._key, offer.pool.incarnation, deadline)
            connection.setblocking(False)
        except OSError:
            connection.close()
            raise
        with self._changed:
            if self._closing:
                connection.close()
                raise StreamLost("the connector is closed")
            self._socket, self._sent = connection, (0, 0.0)
        return seal

    def _lose(self, frame: Frame, reason: str) -> None:
        """The stream is lost, with `frame` and all that is queued."""
        with self._changed:
            for lost in (frame, *self._queue):
                if not lost.dropped:
                    self._failed[lost.transfer_id] = reason
            self._queue.clear()
            self._break(reason)

    def _break(self, reason: str) -> None:
        """Under the lock: closes the connection; transfers with frames on it may have lost them."""
        for transfer_id in self._sequences:
            self._failed[transfer_id] = reason
        self._queue = deque(frame for frame in self._queue if frame.transfer_id not in self._failed)
        self._disconnect()

    def _disconnect(self) -> None:
        """Closes what belongs to the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class TcpSender(SenderConnector):
    """Sends on streams that are connected at once, packed by one of `codecs` where that is quicker.

    Raises ConnectorError if they cannot be connected, or on another layout.
    """

    _stream_type = SendingStream
    _description_type: type[TcpDescription] = TcpDescription
    _num_streams = NUM_STREAMS
    _frame_bytes = 1 << 19  # and at least one row: what is copied is still in the cache when it is sent

    def __init__(self, description: bytes, layout: str, key: bytes, codecs: Collection[int] = CODECS) -> None:
        try:
            offer = msgspec.msgpack.decode(description, type=self._description_type)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of a TCP pool: {error}") from error
        offer.pool.require_layout(layout)
        if not is_loopback(offer.host) and not key:
            raise ConnectorError(f"{offer.host} is another machine, so a cluster key is needed")
        self.counters = ConnectorCounters()
        self._pool = offer.pool
        self._count_lock = threading.Lock()
        at_once = min(self._num_streams, len(os.sched_getaffinity(0)))
        self._choice = CodecChoice([codec for codec in offer.codecs if codec in codecs], at_once)
        self._streams: list[SendingStream] = []
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            for number in range(self._num_streams):
                stream = self._stream_type(number, offer, key, self._choice, self._sent, deadline)
                self._streams.append(stream)
        except OSError as error:
            self.close()
            raise ConnectorError(f"cannot connect to {offer.host} port {offer.port}: {error}") from error

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Queues the frames."""
        return self._queue(transfer_id, range(layer, layer + 1), source, source_blocks, blocks)

    def _queue(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """The bytes. A layer of a block must always go with the same others, or on a single stream: in order."""
        pool = self._pool
        pool.check_push(layers, source, source_blocks, blocks)
        rows, ready = source[:, layers.start : layers.stop].flatten(1).view(torch.uint8), self._ready(source)
        row_bytes = len(layers) * pool.layer_bytes
        shares: dict[int, Frame] = {}
        most = max(1, min(MAX_BLOCKS, self._frame_bytes // row_bytes))
        for source_block, ref in zip(source_blocks, blocks, strict=True):
            number = (ref.block_id // _RUN + layers.start) % len(self._streams)
            frame = shares.get(number)
            if frame is None or len(frame.blocks) == most:
                if frame is not None:
                    self._streams[number].put(frame)
                frame = shares[number] = Frame(transfer_id, layers, rows, [], [], source.dtype.itemsize, ready)
            frame.source_blocks.append(source_block)
            frame.blocks.append(ref)
        for number, frame in shares.items():
            self._streams[number].put(frame)
        return len(blocks) * row_bytes

    def _ready(self, source: torch.Tensor) -> torch.cuda.Event | None:
        """When what was computed of `source` so far is there; None: it is. Raises ConnectorError if it is elsewhere."""
        if not source.is_cpu:
            raise ConnectorError(f"the KV cache lies on {source.device}, this connector sends from CPU memory")
        return None

    def flush(self, transfer_id: str) -> None:
        """Waits until everything pushed so far is with the kernel, as long as bytes go out."""
        try:
            for stream in self._streams:
                stream.flush(transfer_id)
        except ConnectorError:
            self.stop(transfer_id)
            raise

    def condition(self) -> str:
        """What link and codec do, where there is one."""
        return str(self._choice)

    def stop(self, transfer_id: str) -> None:
        """Drops what is queued; a frame under way was copied already."""
        for stream in self._streams:
            stream.stop(transfer_id)

    def close(self) -> None:
        """Drops what is queued and ends the streams."""
        for stream in self._streams:
            stream.close()

    def _sent(self, num_bytes: int) -> None:
        with self._count_lock:
            self.counters.bytes += num_bytes
        self._choice.look(stream.sent for stream in self._streams)


def _ended(connection: socket.socket) -> bool:
    """Whether the receiver has ended the stream; after the handshake it has nothing else to say."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
