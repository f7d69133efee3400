"""One host: the sender's pool lies in shared memory, which it lends, and the receiver reads what it is told of there.

So a KV service that knows no CUDA device serves workers on such devices, whose own copy engines read its pool, and
nobody maps their memory: they can sleep. Sealed headers come over a TCP stream, as for `tcp`, whose books and rules
hold here too. Each names the sender's pages in place of a payload; with the first, both sides agree on the segment.

A device copies on a stream of its own. A transfer is shut out once it is marked, the lock of each stream was passed,
and the last copy that it began has ended: no copy waits for anything but the device. The sender says that all is sent
before it is read, but holds its pages until the receiver has compared their sums, or the transfer is over.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from engine.kv_cache import KVCache
from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription, PushRefused, SenderIdentity
from kv_transfer.connectors.pinned import PinnedPool, pinned
from kv_transfer.connectors.process_group import RECEIVER, SENDER, PairStore, meet, recorded
from kv_transfer.connectors.shared_memory import MappedSegment, SegmentDescription
from kv_transfer.connectors.tcp import ReceivingStream, StreamExpected, TcpDescription, TcpReceiver
from kv_transfer.connectors.tcp_sender import Frame, SendingStream, TcpSender
from kv_transfer.connectors.tcp_wire import FORMAT, Header, Seal, StreamLost
from kv_transfer.process_identity import boot_id
from kv_transfer.references import BlockRef

CAPABILITIES = Capabilities("lent_memory", cross_host=False, one_sided=False)
_ENTRY = "segment"


class _Description(TcpDescription, frozen=True, kw_only=True):
    boot_id: str


class LentReceiver(TcpReceiver):
    """Reads into the pages of `cache`, on any device; they may be given back and taken anew between transfers."""

    capabilities = CAPABILITIES

    def __init__(
        self, cache: KVCache, pool: PoolDescription, generation: Callable[[int], int], host: str, key: bytes
    ) -> None:
        self.cache = cache
        self.ends: dict[str, torch.cuda.Event] = {}  # of the last copy that each transfer began, by transfer
        super().__init__(cache.tensor.new_empty(0, *cache.tensor.shape[1:]), pool, generation, host, key, codecs=())

    def describe(self) -> bytes:
        """Address, shape of the pool, and this host."""
        return msgspec.msgpack.encode(_Description(*msgspec.structs.astuple(self._description), boot_id=boot_id()))

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Shuts the transfer out; False: a device has not done its last copy yet."""
        super().finish(transfer_id)
        end = self.ends.get(transfer_id)
        if end is not None and not end.query():  # type: ignore[no-untyped-call]
            return False
        self.ends.pop(transfer_id, None)
        return True

    def finish(self, transfer_id: str) -> None:
        """Writes no more of this transfer."""
        super().finish(transfer_id)
        if (end := self.ends.pop(transfer_id, None)) is not None:
            end.synchronize()

    def _make_stream(self, connection: socket.socket) -> ReceivingStream:
        return _BorrowingStream(self, connection)


class _BorrowingStream(ReceivingStream):
    """One sender's stream and the segment that it lends."""

    _reads_pages = True
    _receiver: LentReceiver
    _has_met = False
    _borrowed: _Borrowed | None = None

    def _meet(self, seal: Seal) -> None:
        self._borrowed = meet("lent_memory", self._socket, seal, RECEIVER, self._borrow)

    def _borrow(self, store: PairStore) -> _Borrowed:
        try:
            offer = msgspec.msgpack.decode(store.get(_ENTRY), type=SegmentDescription)
            return _Borrowed(offer, self._receiver.pool, self._receiver.cache.tensor.device)
        except ConnectorError as error:
            raise StreamLost(str(error)) from error

    def _land(self, header: Header, expected: StreamExpected) -> None:
        receiver = self._receiver
        assert self._borrowed is not None
        try:
            self._borrowed.check(header.rows)
        except ConnectorError as error:
            receiver.fail(expected, str(error))
            receiver.refuse("range", str(error))
            return
        with self._lock:
            if not expected.closed:
                if (end := self._borrowed.read(header, receiver.cache.tensor)) is not None:
                    receiver.ends[header.transfer_id] = end
                receiver.landed(expected, header)
                return
        receiver.refuse("unexpected", "the transfer ended in the middle of a frame")

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._borrowed is not None:
            self._borrowed.close()
            self._borrowed = None


class _Borrowed:
    """A sender's pool, for pages on `device`. Raises ConnectorError if its blocks are not like those of `pool`."""

    def __init__(self, offer: SegmentDescription, pool: PoolDescription, device: torch.device) -> None:
        offer.pool.require_layout(pool.layout)
        if not offer.pool_bytes or offer.pool.block_bytes != pool.block_bytes:
            raise ConnectorError("the sender lends no pool of such blocks")
        self._layer_bytes = pool.layer_bytes
        self._stream: torch.cuda.Stream | None = None
        self._memory: MappedSegment | PinnedPool
        if device.type == "cpu":
            self._memory = MappedSegment(offer)
            self._pages = torch.from_numpy(self._memory.rows).flatten(1)
        else:
            self._memory = pinned(offer)
            self._pages = self._memory.pages
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def check(self, rows: Sequence[int]) -> None:
        """Raises ConnectorError unless these pages can be read."""
        if not all(0 <= row < len(self._pages) for row in rows):
            raise PushRefused(f"pages {list(rows)[:8]} are not all among the {len(self._pages)} that are lent")
        self._memory.check()

    def read(self, header: Header, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """Copies a frame into pages of `tensor` [., L, page, heads, 2 * dim]; an event: so far it is only begun."""
        layers = slice(header.layer * self._layer_bytes, (header.layer + header.layers) * self._layer_bytes)
        source, pages = self._pages[:, layers], tensor.view(torch.uint8).flatten(1)[:, layers]
        blocks = [ref.block_id for ref in header.blocks]
        if self._stream is None:
            ours, theirs = pages.numpy(), source.numpy()  # without torch's threads, which compute
            for row, block in zip(header.rows, blocks, strict=True):
                ours[block] = theirs[row]
            return None
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for row, block in zip(header.rows, blocks, strict=True):
                pages[block].copy_(source[row], non_blocking=True)
            return recorded(self._stream)

    def close(self) -> None:
        """Lets go of the segment once nothing is read."""
        if self._stream is not None:
            self._stream.synchronize()
        if isinstance(self._memory, MappedSegment):
            self._memory.close()
        del self._pages, self._memory


class Lent(NamedTuple):
    """A pool that can be lent: its `pages`, as they are pushed, lie in this segment."""

    pages: torch.Tensor
    segment: SegmentDescription


class _Offer(_Description, frozen=True, kw_only=True):
    segment: SegmentDescription


class _LendingStream(SendingStream):
    """The stream to a receiver that reads."""

    _offer: _Offer
    _has_lent = False

    def _prepare(self, frame: Frame) -> None:
        if not self._has_lent:
            assert self._socket is not None
            meet("lent_memory", self._socket, self._seal, SENDER, self._lend)
            self._has_lent = True

    def _lend(self, store: PairStore) -> contextlib.ExitStack:
        store.set(_ENTRY, msgspec.msgpack.encode(self._offer.segment))
        return contextlib.ExitStack()  # nothing is held on this side

    def _send_frame(self, frame: Frame) -> None:
        self._prepare(frame)
        sequence = self._next_sequence(frame)
        if sequence is None:
            return
        with self._changed:
            self._copying = False
        header = Header(
            FORMAT,
            frame.transfer_id,
            self._number,
            sequence,
            frame.layers.start,
            frame.blocks,
            len(frame.blocks) * frame.rows.shape[1],
            0,
            len(frame.layers),
            rows=frame.source_blocks,
        )
        self._send([memoryview(self._seal.close(header))])
        self._on_sent(header.length)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._has_lent = False


class LentSender(TcpSender):
    """Tells a receiver on this host what to read of `lent`. Raises ConnectorError, also on another host."""

    _num_streams = 1
    _stream_type = _LendingStream
    _description_type = _Offer
    _frame_bytes = 64 << 20

    def __init__(self, description: bytes, layout: str, key: bytes, lent: Lent | None) -> None:
        if lent is None:
            raise ConnectorError("the KV cache here lies in no memory that is lent")
        try:
            told = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"malformed description of a reader: {error}") from error
        if told.boot_id != boot_id():
            raise ConnectorError("the receiver is not on this host")
        self._lent = lent
        offer = _Offer(**msgspec.structs.asdict(told), segment=lent.segment)
        super().__init__(msgspec.msgpack.encode(offer), layout, key, codecs=())

    def push_layers(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """In frames of all layers, as there is one stream."""
        return self._queue(transfer_id, layers, source, source_blocks, blocks)

    def _ready(self, source: torch.Tensor) -> None:
        if source.data_ptr() != self._lent.pages.data_ptr():
            raise ConnectorError("only what lies in the pool can be lent, not what was packed for a receiver")
