"""Whatever comes over the wire, the ZMQ receiver writes only what is expected, and lives."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
import xxhash
import zmq
from frame_faults import BLOCKS, GENERATION, HEADER_FAULTS, LAYERS, REFS, ROW, D, L, ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.connectors.base import PoolDescription
from kv_transfer.connectors.zmq_stream import ZmqReceiver, ZmqSender
from kv_transfer.references import BlockRef

PICKLE = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."


class Wire:
    """A receiver, a raw socket to it, and an honest transfer that tells when all before it was handled."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(BLOCKS, LAYERS, 4, 2, 8)
        pool = PoolDescription(D, BLOCKS, LAYERS * ROW, ROW, L)
        self.receiver = ZmqReceiver(self.tensor, pool, lambda block: GENERATION, "127.0.0.1", lambda s, server: None)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.connect(msgspec.msgpack.decode(self.receiver.describe())["address"])
        self.marks = 0

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def settle(self) -> None:
        """Block 3 belongs to an honest transfer on the same socket: when its row lands, all before was handled."""
        self.marks += 1
        key, ref = f"mark{self.marks}/0", BlockRef(D, 3, GENERATION)
        self.receiver.expect(key, [ref])
        self.send(*message(transfer_id=key, blocks=[ref]))
        ends = time.monotonic() + 30
        while self.receiver.bytes_landed(key) != ROW:
            assert time.monotonic() < ends, "the receiver is dead"
            time.sleep(0.001)
        self.receiver.finish(key)
        self.tensor[3].zero_()

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.receiver.close()


def message(
    payload: bytes | None = None, *, damaged: bool = False, without: int = 0, **changes: object
) -> tuple[bytes, bytes]:
    """A good message of one layer of REFS, but for `changes`."""
    blocks = changes.get("blocks", REFS)
    data = payload if payload is not None else b"\x01" * (ROW * len(blocks))  # type: ignore[arg-type]
    header = {"format": 1, "transfer_id": "r/0", "sequence": 0, "layer": 0, "blocks": blocks, "checksum": 0}
    header |= {"checksum": xxhash.xxh3_64_intdigest(data)} | changes
    encoded = msgspec.msgpack.encode(list(header.values()))
    return encoded[: len(encoded) - without], (b"\x02" + data[1:] if damaged else data)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((b"",), "malformed"),
        ((PICKLE, PICKLE), "malformed"),
        ((b"\xc1", b""), "malformed"),
        ((message()[0],), "malformed"),
        ((*message(), b""), "malformed"),
        ((b"\x91" * 100_000, b""), "malformed"),  # nested deeper than any stack
        ((b"\xdd\xff\xff\xff\xff", b""), "malformed"),  # says that 4 billion entries follow
        *((message(**changes), kind) for changes, kind in HEADER_FAULTS),
        (message(damaged=True), "checksum"),
        (message(checksum=0), "checksum"),
    ],
    ids=str,
)
def test_what_is_off_is_counted_and_not_written(wire: Wire, frames: tuple[bytes, ...], kind: str) -> None:
    before = dict(wire.receiver.counters.refused)
    wire.receiver.expect("r/0", REFS)
    wire.send(*frames)
    wire.settle()
    assert not wire.tensor.any()
    assert wire.receiver.counters.refused == before | {kind: before.get(kind, 0) + 1}
    # A transfer that has lost a message this way has failed; a stranger's or an old message does it no harm.
    harmless = kind in ("malformed", "unexpected", "repeated")
    assert (wire.receiver.failure("r/0") is None) == harmless
    wire.send(*message())
    wire.settle()
    assert bool(wire.tensor.any()) == harmless
    wire.receiver.finish("r/0")
    wire.tensor.zero_()


def test_message_counts_once(wire: Wire) -> None:
    """An old message again, after a newer one wrote the same rows, must not bring the old bytes back."""
    wire.receiver.expect("r/0", REFS)
    wire.send(*message())
    wire.send(*message(b"\x05" * 2 * ROW, sequence=1))
    wire.send(*message())
    wire.settle()
    assert wire.tensor[[0, 2], 0].view(torch.uint8).eq(5).all()
    assert wire.receiver.bytes_landed("r/0") == 4 * ROW
    wire.receiver.finish("r/0")
    wire.send(*message(sequence=2))
    wire.tensor.zero_()
    wire.settle()
    assert not wire.tensor.any()


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "format": junk | st.just(1),
        "transfer_id": junk | st.just("r/0"),
        "sequence": junk | st.integers(-2, 2),
        "layer": junk | st.integers(-2, LAYERS),
        "blocks": st.lists(st.tuples(st.just(D), st.integers(-2, BLOCKS), st.integers(0, 4)), max_size=3) | junk,
        "checksum": junk,
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(st.tuples(st.binary(max_size=64) | headers, st.binary(max_size=600)), min_size=1, max_size=12))
def test_nothing_off_is_ever_written(wire: Wire, batch: list[tuple[bytes | dict[str, object], bytes]]) -> None:
    wire.receiver.expect("r/0", REFS)
    for header, payload in batch:
        if isinstance(header, dict):
            fields = {
                "format": 1,
                "transfer_id": "r/0",
                "sequence": 0,
                "layer": 0,
                "blocks": REFS,
                "checksum": 1,
            } | header
            header = msgspec.msgpack.encode(list(fields.values()))
        wire.send(header, payload)
    wire.settle()
    wire.receiver.finish("r/0")
    assert not wire.tensor.any()


def test_two_honest_senders_at_once(wire: Wire) -> None:
    """Sequences are of a transfer, not of a socket."""
    wire.tensor.zero_()
    senders = [ZmqSender(wire.receiver.describe(), L, lambda s, server: None) for _ in range(2)]
    source = torch.randn(wire.tensor.shape)
    for i, block in enumerate((0, 2)):
        wire.receiver.expect(f"s{i}/0", ref(block))
    for layer in range(LAYERS):
        for i, block in enumerate((0, 2)):
            senders[i].push(f"s{i}/0", layer, source, [block], ref(block))
    for i, sender in enumerate(senders):
        sender.flush(f"s{i}/0")
    ends = time.monotonic() + 30
    while any(wire.receiver.bytes_landed(f"s{i}/0") != LAYERS * ROW for i in range(2)):
        assert time.monotonic() < ends
        time.sleep(0.001)
    assert torch.equal(wire.tensor[[0, 2]], source[[0, 2]])
    for sender in senders:
        sender.close()
