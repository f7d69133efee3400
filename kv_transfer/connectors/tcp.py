"""Any host: KV bytes over TCP streams, received straight into the pages they are for.

Before one byte of a payload is taken, its header is: transfer, blocks and length must be expected here. What is not
is read off into a scratch buffer, dropped and counted. Each stream has a thread on either side, so that copies and
checksums of one transfer run in parallel and a peer that is slow delays nobody. A payload that was packed (`codec`) is
unpacked and checked beside the pool and copied into the pages then.

The receiver takes bytes in calls that do not wait, each made holding the stream's lock and after a look at whether the
transfer is still expected. So a transfer is shut out by marking it, then passing the lock of each stream once: no write
is under way then, and none will follow.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import msgspec
import structlog
import torch
import xxhash

from kv_transfer.connectors.base import (
    Capabilities,
    ConnectorCounters,
    ConnectorError,
    PoolDescription,
)
from kv_transfer.connectors.codec import CODECS, unpack
from kv_transfer.connectors.frames import Expected, FrameReceiver, Refused, check_destination
from kv_transfer.connectors.tcp_wire import (
    MAX_STREAMS,
    PREFIX_BYTES,
    STUCK_SECONDS,
    Header,
    Seal,
    StreamLost,
    cut,
    greet_sender,
    tune,
)
from kv_transfer.references import BlockRef, StaleReference

log = structlog.get_logger()

CAPABILITIES = Capabilities("tcp", cross_host=True, one_sided=False)
_GREETING_SECONDS = 2.0
_MAX_CONNECTIONS = 64 * MAX_STREAMS  # more are closed at once
_SCRATCH_BYTES = 1 << 18


class TcpDescription(msgspec.Struct, frozen=True):
    """What a sender must know: the pool, and where its receiver listens."""

    pool: PoolDescription
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    codecs: tuple[int, ...] = ()  # by which payloads may be packed


@dataclass(slots=True, eq=False)
class StreamExpected(Expected):
    """A transfer whose frames come on several streams."""

    next_sequence: dict[int, int] = field(default_factory=dict)  # by stream
    closed: bool = False  # set once: not a byte may be written any more


class TcpReceiver(FrameReceiver):
    """Listens on `host`; receives into `tensor` [num_blocks, L, page, heads, 2 * dim], which lies on CPU.

    `host` is an address that senders can reach. `generation` gives a block's present generation; any thread may ask.
    `key` is the secret of both sides; without one, `host` must be a loopback address. `codecs`: those that senders may
    use.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        tensor: torch.Tensor,
        pool: PoolDescription,
        generation: Callable[[int], int],
        host: str,
        key: bytes,
        codecs: tuple[int, ...] = CODECS,
    ) -> None:
        self.counters = ConnectorCounters()
        self.pool = pool
        self.codecs = codecs
        self.key = key
        # [num_blocks, L, layer_bytes], a view
        self.pages = tensor.flatten(2).view(torch.uint8)
        self._generation = generation
        self._lock = threading.Lock()  # over everything below; held for moments only
        self._expected: dict[str, StreamExpected] = {}
        self._streams: dict[ReceivingStream, threading.Thread] = {}
        self._closing = False
        self._listener = _listen(host, secret=bool(key))
        address = self._listener.getsockname()
        self._description = TcpDescription(pool, address[0], address[1], codecs)
        self._thread = threading.Thread(target=self._accept, name="kv-tcp", daemon=True)
        self._thread.start()

    def describe(self) -> bytes:
        """Address and shape of the pool."""
        return msgspec.msgpack.encode(self._description)

    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """Lets this transfer write these blocks."""
        self.finish(transfer_id)
        with self._lock:
            self._expected[transfer_id] = StreamExpected(frozenset(ref.block_id for ref in blocks))

    def finish(self, transfer_id: str) -> None:
        """Writes no more of this transfer."""
        for stream in self._shut_out(transfer_id):
            stream.pass_lock()

    def close(self) -> None:
        """Ends all streams and their threads."""
        with self._lock:
            self._closing = True
            threads = list(self._streams.values())
            for stream in self._streams:
                stream.cut()
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _shut_out(self, transfer_id: str) -> list[ReceivingStream]:
        """Marks the transfer; when the lock of each of these streams was passed, nothing of it is written any more."""
        with self._lock:
            expected = self._expected.pop(transfer_id, None)
            if expected is None:
                return []
            expected.closed = True
            return list(self._streams)

    def _make_stream(self, connection: socket.socket) -> ReceivingStream:
        return ReceivingStream(self, connection)

    # For the streams

    def admit(self, header: Header) -> StreamExpected:
        """The transfer of a frame, which may be written. Raises Refused or StaleReference."""
        pool = self.pool
        with self._lock:
            expected = self._expected.get(header.transfer_id)
            if expected is None or expected.failure is not None:
                raise Refused("unexpected", "the transfer is not under way here")
            due = expected.next_sequence.get(header.stream, 0)
            if header.sequence < due:
                raise Refused("repeated", "the frame was received before")
            try:
                if header.sequence > due:
                    raise Refused("lost", "frames before it were lost")
                check_destination(
                    pool,
                    self._generation,
                    expected.blocks,
                    header.layer,
                    header.blocks,
                    header.length,
                    header.layers,
                )
            except (StaleReference, Refused) as error:
                expected.failure = str(error)
                raise
            expected.next_sequence[header.stream] = due + 1
        return expected

    @cached_property
    def _memory(self) -> memoryview:
        """All bytes of the pool, which lies on CPU."""
        return self.pages.view(-1).numpy().data

    def rows(self, header: Header) -> list[memoryview]:
        """Where the payload of an admitted frame goes."""
        pool = self.pool
        starts = [ref.block_id * pool.block_bytes + header.layer * pool.layer_bytes for ref in header.blocks]
        return [self._memory[start : start + header.layers * pool.layer_bytes] for start in starts]

    def landed(self, expected: StreamExpected, header: Header) -> None:
        """A whole frame is in its rows."""
        with self._lock:
            expected.landed += header.length
            self.counters.count(header.length, header.packed if header.codec else None)

    def fail(self, expected: StreamExpected, reason: str) -> None:
        """The transfer has lost bytes."""
        with self._lock:
            expected.failure = expected.failure or reason

    def refuse(self, kind: str, reason: str) -> None:
        """Counts what was not written, or what is worthless."""
        with self._lock:
            self.counters.refuse(kind)
        log.warning("KV frame dropped", kind=kind, reason=reason)

    def ended(self, stream: ReceivingStream) -> None:
        """The stream's thread ends."""
        with self._lock:
            self._streams.pop(stream, None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("a KV stream could not be accepted", reason=str(error))
                time.sleep(0.1)  # out of file descriptors, as a rule
                continue
            with self._lock:
                if self._closing or len(self._streams) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                stream = self._make_stream(connection)
                thread = threading.Thread(target=stream.run, name="kv-tcp-stream", daemon=True)
                self._streams[stream] = thread
                thread.start()


class ReceivingStream:
    """One connection, from its handshake to its end, on a thread of its own."""

    _scratch = memoryview(bytearray(_SCRATCH_BYTES))  # of all streams: what is in it is never read
    _reads_pages = False  # of the sender, where payloads lie; else they follow their headers
    _has_met = True  # False: before the first frame there is something to agree on

    def __init__(self, receiver: TcpReceiver, connection: socket.socket) -> None:
        self._receiver = receiver
        self._socket = connection
        self._lock = threading.Lock()  # held for each write into pages
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def pass_lock(self, seconds: float = -1) -> bool:
        """Returns when no write that began before the call is under way; False: one still is after so long."""
        if passed := self._lock.acquire(timeout=seconds):
            self._lock.release()
        return passed

    def cut(self) -> None:
        """Ends the connection; the thread notices."""
        cut(self._socket)

    def run(self) -> None:
        """Takes frames until the connection ends or cannot be trusted any more."""
        receiver = self._receiver
        try:
            tune(self._socket)
            deadline = time.monotonic() + _GREETING_SECONDS
            seal = greet_sender(self._socket, receiver.key, receiver.pool.incarnation, deadline)
        except OSError as error:
            receiver.refuse("stranger", str(error))
        else:
            self._socket.setblocking(False)
            try:
                while self._take_frame(seal):
                    pass
            except Refused as error:  # where the next frame begins is not known
                receiver.refuse(error.kind, str(error))
            except OSError as error:
                log.info("KV stream lost", reason=str(error))
        finally:
            receiver.ended(self)
            self._disconnect()

    def _disconnect(self) -> None:
        """Closes what belongs to the connection."""
        self._socket.close()

    def _meet(self, seal: Seal) -> None:
        """Agrees with the sender, who has begun to, on what frames need. Raises StreamLost."""

    def _take_frame(self, seal: Seal) -> bool:
        """Takes one frame, or drops it. False: the stream ended between frames."""
        self._poll.poll()  # as long as it takes: nobody has anything to say
        try:
            if not self._socket.recv(1, socket.MSG_PEEK):
                return False
        except BlockingIOError:
            return True  # woken for nothing
        if not self._has_met:
            self._meet(seal)
            self._has_met = True
            return True
        prefix = bytearray(PREFIX_BYTES)
        self._fill([memoryview(prefix)])
        encoded = bytearray(seal.header_bytes(prefix))
        self._fill([memoryview(encoded)])
        header = seal.open(prefix, encoded)
        pool = self._receiver.pool
        if header.length > pool.num_blocks * pool.layer_bytes * min(max(header.layers, 1), pool.num_layers):
            raise Refused(
                "malformed", f"a frame of {header.length} bytes is more than {header.layers} layers of the pool"
            )
        if header.codec and header.codec not in self._receiver.codecs:
            raise Refused("malformed", f"codec {header.codec} was not offered")
        if bool(header.rows) != self._reads_pages:
            raise Refused("malformed", "payloads come on the wire or in pages, as the kind of connector says")
        try:
            expected = self._receiver.admit(header)
        except (Refused, StaleReference) as error:
            self._receiver.refuse(error.kind, str(error))
            self._drop(header.wire_bytes)
        else:
            self._land(header, expected)
        return True

    def _land(self, header: Header, expected: StreamExpected) -> None:
        """Takes the payload of an admitted frame. Raises OSError if it does not come."""
        receiver = self._receiver
        rows = receiver.rows(header)
        views = [memoryview(bytearray(header.packed))] if header.codec else list(rows)
        try:
            received = self._fill(list(views), expected)
        except OSError:
            receiver.fail(expected, "the stream was cut in the middle of a frame")
            raise
        if received < header.wire_bytes:
            receiver.refuse("unexpected", "the transfer ended in the middle of a frame")
            self._drop(header.wire_bytes - received)
            return
        try:
            if header.codec:
                views = [unpack(views[0], header.codec, header.length).data]
            digest = xxhash.xxh3_64()
            for view in views:
                digest.update(view)
            if digest.intdigest() != header.checksum:
                raise Refused("checksum", "the payload was damaged on the way")
        except Refused as error:
            receiver.fail(expected, str(error))
            receiver.refuse(error.kind, str(error))
            return
        if header.codec and not self._copy_into(views[0], rows, expected):
            receiver.refuse("unexpected", "the transfer ended in the middle of a frame")
        else:
            receiver.landed(expected, header)

    def _copy_into(self, payload: memoryview, rows: list[memoryview], expected: StreamExpected) -> bool:
        """Copies an unpacked payload into its rows, unless `expected` is shut out."""
        with self._lock:
            if expected.closed:
                return False
            start = 0
            for row in rows:
                row[:] = payload[start : start + len(row)]
                start += len(row)
        return True

    def _fill(self, views: list[memoryview], expected: StreamExpected | None = None) -> int:
        """Receives until `views` are full or `expected` is shut out; returns the bytes. Raises StreamLost."""
        total = first = 0
        while first < len(views):
            with self._lock:
                if expected is not None and expected.closed:
                    break
                try:
                    received = self._socket.recvmsg_into(views[first:])[0]
                except BlockingIOError:
                    received = -1
            if received < 0:
                if not self._poll.poll(STUCK_SECONDS * 1000):
                    raise StreamLost(f"no byte in {STUCK_SECONDS:g} s in the middle of a frame")
                continue
            if received == 0:
                raise StreamLost("the sender ended it in the middle of a frame")
            total += received
            while first < len(views) and received >= len(views[first]):
                received -= len(views[first])
                first += 1
            if received:
                views[first] = views[first][received:]
        return total

    def _drop(self, num_bytes: int) -> None:
        """Takes a payload that is not wanted."""
        while num_bytes:
            num_bytes -= self._fill([self._scratch[: min(num_bytes, _SCRATCH_BYTES)]])


def is_loopback(host: str) -> bool:
    """Whether `host` is the address of this machine alone. Raises ConnectorError if it is no address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConnectorError(f"{host!r} is not an IP address") from None


def _listen(host: str, *, secret: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if not secret and not is_loopback(str(address[0])):
            raise ConnectorError(f"{host} can be reached from other machines, so a cluster key is needed")
        return socket.create_server(address, family=family, backlog=_MAX_CONNECTIONS)
    except OSError as error:
        raise ConnectorError(f"cannot listen on {host!r} for KV bytes: {error}") from error
