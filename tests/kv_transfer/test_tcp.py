"""Whatever comes over TCP, the receiver writes only what is expected; streams that are cut, stuck or strange end."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from frame_faults import BLOCKS, GENERATION, HEADER_FAULTS, LAYERS, REFS, ROW, D, L, ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lying_stream import KEY, Liar, Wire, message, wait_until

from kv_transfer.connectors import tcp, tcp_sender, tcp_wire
from kv_transfer.connectors.base import ConnectorError, PoolDescription, SenderIdentity
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.tcp_wire import greet_receiver
from kv_transfer.references import BlockRef

SENDER = SenderIdentity("p" * 32, "", 0, 0)


@pytest.fixture(scope="module")
def shared_wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def wire(shared_wire: Wire) -> Wire:
    shared_wire.tensor.zero_()
    return shared_wire


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ((b"",), "malformed"),
        ((b"\x80\x04\x8c\x05posix\x94.",), "malformed"),
        ((b"\xc1",), "malformed"),
        ((b"\x91" * 100_000,), "malformed"),  # nested deeper than any stack
        ((b"\xdd\xff\xff\xff\xff",), "malformed"),  # says that 4 billion entries follow
        ((b"\x90" * (tcp_wire.MAX_HEADER + 1),), "malformed"),
        (message(stream=tcp_wire.MAX_STREAMS), "malformed"),
        (message(stream=-1), "malformed"),
        (message(length=-1), "malformed"),
        (message(length=BLOCKS * ROW + 1), "malformed"),
        (message(length=2**63), "malformed"),
        (message(layers=0), "range"),
        (message(layers=LAYERS + 1), "range"),
        (message(layers=LAYERS), "length"),
        (message(b"\1" * 4 * ROW, layer=LAYERS - 1, layers=2), "range"),
        (message(b"", blocks=ref() * (tcp_wire.MAX_BLOCKS + 1)), "malformed"),
        *((message(**changes), kind) for changes, kind in HEADER_FAULTS),
    ],
    ids=str,
)
def test_what_is_off_is_counted_and_not_written(wire: Wire, frame: tuple[bytes, ...], kind: str) -> None:
    before = dict(wire.receiver.counters.refused)
    wire.receiver.expect("r/0", REFS)
    wire.send(*frame)
    wire.settle()
    assert not wire.tensor.any()
    assert wire.receiver.counters.refused == before | {kind: before.get(kind, 0) + 1}
    # A transfer that has lost a frame this way has failed; a stranger's or an old frame does it no harm.
    harmless = kind in ("malformed", "unexpected", "repeated")
    assert (wire.receiver.failure("r/0") is None) == harmless
    wire.send(*message())
    wire.settle()
    assert bool(wire.tensor.any()) == harmless
    wire.receiver.finish("r/0")


@pytest.mark.parametrize("frame", [message(damaged=True), message(checksum=0)], ids=["damaged", "checksum"])
def test_damage_fails_its_transfer_and_touches_no_other_block(wire: Wire, frame: tuple[bytes, bytes]) -> None:
    """A checksum is known only when the bytes are there, so the rows of the transfer itself are written."""
    before = wire.receiver.counters.refused.get("checksum", 0)
    wire.receiver.expect("r/0", REFS)
    wire.send(*frame)
    wire.settle()
    assert wire.receiver.counters.refused["checksum"] == before + 1
    assert "damaged" in (wire.receiver.failure("r/0") or "") and wire.receiver.bytes_landed("r/0") == 0
    assert not wire.tensor[[1, 3]].any() and not wire.tensor[:, 1].any()
    wire.receiver.finish("r/0")


def test_frame_counts_once(wire: Wire) -> None:
    """An old frame again, after a newer one wrote the same rows, must not bring the old bytes back."""
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


def test_a_frame_of_several_layers(wire: Wire) -> None:
    wire.receiver.expect("r/0", REFS)
    data = os.urandom(4 * ROW)
    wire.send(*message(data, layers=2))
    wire.settle()
    assert wire.tensor[[0, 2]].view(torch.uint8).flatten().tolist() == list(data)
    assert not wire.tensor[1].any()
    assert wire.receiver.bytes_landed("r/0") == 4 * ROW
    wire.receiver.finish("r/0")


def test_frames_in_pieces_arrive_whole(wire: Wire) -> None:
    wire.receiver.expect("r/0", REFS)
    data = os.urandom(2 * ROW)
    header, payload = message(data)
    frame = wire.liar.seal(header) + payload
    for start in range(0, len(frame), 7):
        wire.socket.sendall(frame[start : start + 7])
        time.sleep(0.0005)
    wait_until(lambda: wire.receiver.bytes_landed("r/0") == 2 * ROW)
    assert wire.tensor[[0, 2], 0].view(torch.uint8).flatten().tolist() == list(data)
    wire.receiver.finish("r/0")


def test_stream_cut_in_the_middle_fails_its_transfer(wire: Wire) -> None:
    wire.receiver.expect("r/0", REFS)
    header, payload = message()
    wire.socket.sendall(wire.liar.seal(header) + payload[:-1])
    wire.socket.close()
    wait_until(lambda: wire.receiver.failure("r/0"))
    assert "cut in the middle" in (wire.receiver.failure("r/0") or "") and wire.receiver.bytes_landed("r/0") == 0
    wire.receiver.finish("r/0")
    wire.connect()


def test_fence_in_the_middle_of_a_frame_holds(wire: Wire) -> None:
    """Half of a payload is in the pages when the transfer is shut out; the other half is not written."""
    wire.receiver.expect("r/0", REFS)
    header, payload = message()
    wire.socket.sendall(wire.liar.seal(header) + payload[: ROW + 8])
    wait_until(lambda: bool(wire.tensor[2].any()))
    before = wire.receiver.counters.refused.get("unexpected", 0)
    assert wire.receiver.fence("r/0", SENDER)
    wire.tensor.zero_()
    wire.receiver.expect("s/0", REFS)  # the blocks have another owner
    wire.socket.sendall(payload[ROW + 8 :])
    wire.settle()
    assert not wire.tensor.any() and wire.receiver.bytes_landed("s/0") == 0
    assert wire.receiver.counters.refused["unexpected"] == before + 1
    wire.send(*message(transfer_id="s/0"))  # the stream has not lost its place
    wait_until(lambda: wire.receiver.bytes_landed("s/0") == 2 * ROW)
    wire.receiver.finish("s/0")


def test_fence_holds_while_streams_write(wire: Wire) -> None:
    """Whenever the fence comes, not a byte comes after it."""
    sender, source = TcpSender(wire.receiver.describe(), L, KEY), torch.ones(wire.tensor.shape)
    for attempt in range(100):
        key = f"f{attempt}/0"
        wire.receiver.expect(key, REFS)
        for layer in (0, 1) * 20:
            sender.push(key, layer, source, [0, 2], REFS)
        if attempt % 3:
            wait_until(lambda: bool(wire.tensor.any()))
        assert wire.receiver.fence(key, SENDER)
        wire.tensor.zero_()
        sender.flush(key)
        assert not wire.tensor.any()
    sender.close()


def test_a_sealed_frame_opens_once(wire: Wire) -> None:
    wire.receiver.expect("r/0", REFS)
    before = wire.receiver.counters.refused.get("malformed", 0)
    header, payload = message()
    sealed = wire.liar.seal(header) + payload
    wire.socket.sendall(sealed + sealed)
    wait_until(lambda: wire.receiver.counters.refused.get("malformed", 0) == before + 1)
    wire.settle()
    assert wire.receiver.bytes_landed("r/0") == 2 * ROW and wire.receiver.failure("r/0") is None
    wire.receiver.finish("r/0")


@pytest.mark.parametrize("size", [tcp_wire.MAX_HEADER + 1, 2**32 - 1])
def test_oversized_header_ends_the_stream_before_it_comes(wire: Wire, size: int) -> None:
    before = wire.receiver.counters.refused.get("malformed", 0)
    wire.socket.sendall(size.to_bytes(4, "little") + bytes(16))
    assert wire.socket.recv(1) == b""
    wait_until(lambda: wire.receiver.counters.refused.get("malformed", 0) == before + 1)
    wire.connect()


@pytest.mark.parametrize("key", [b"", b"x" * 32])
def test_wrong_key_is_said_at_once_and_counted(wire: Wire, key: bytes) -> None:
    before = wire.receiver.counters.refused.get("stranger", 0)
    with pytest.raises(ConnectorError, match="another cluster key"):
        TcpSender(wire.receiver.describe(), L, key)
    wait_until(lambda: wire.receiver.counters.refused.get("stranger", 0) == before + 1)


def test_a_recorded_stream_opens_nothing(wire: Wire) -> None:
    """Everything that an honest sender said, again, on a new connection."""
    said: list[bytes] = []

    class Recorded:
        def __init__(self, inner: socket.socket) -> None:
            self._inner = inner
            self.settimeout, self.recv = inner.settimeout, inner.recv

        def sendall(self, data: bytes) -> None:
            said.append(data)
            self._inner.sendall(data)

    stream = wire.call()
    seal = greet_receiver(Recorded(stream), KEY, D, time.monotonic() + 10)  # type: ignore[arg-type]
    header, payload = message()
    said.append(Liar(seal._key).seal(header) + payload)
    stream.close()
    before = wire.receiver.counters.refused.get("stranger", 0)
    wire.receiver.expect("r/0", REFS)
    again = wire.call()
    again.sendall(b"".join(said))
    wait_until(lambda: wire.receiver.counters.refused.get("stranger", 0) >= before + 1)
    again.close()
    assert not wire.tensor.any() and wire.receiver.bytes_landed("r/0") == 0
    wire.receiver.finish("r/0")


def test_streams_that_say_nothing_delay_nobody_and_end(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_GREETING_SECONDS", 0.5)
    monkeypatch.setattr(tcp, "STUCK_SECONDS", 0.3)
    silent = [wire.call() for _ in range(20)]
    silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    wire.receiver.expect("stuck/0", ref(1))
    header, payload = message(transfer_id="stuck/0", blocks=ref(1))
    wire.socket.sendall(wire.liar.seal(header) + payload[:-1])
    sender, source = TcpSender(wire.receiver.describe(), L, KEY), torch.randn(wire.tensor.shape)
    wire.receiver.expect("r/0", REFS)
    sender.push("r/0", 0, source, [1, 3], REFS)
    sender.flush("r/0")
    wait_until(lambda: wire.receiver.bytes_landed("r/0") == 2 * ROW)
    assert torch.equal(wire.tensor[[0, 2], 0], source[[1, 3], 0])
    wait_until(lambda: wire.receiver.failure("stuck/0"))
    for stream in (*silent, wire.socket):
        with contextlib.suppress(ConnectionError):  # what it had sent was not read
            assert stream.recv(1) == b""
        stream.close()
    sender.close()
    wire.receiver.finish("stuck/0")
    wire.receiver.finish("r/0")
    wire.connect()


def test_sender_to_a_stuck_receiver_gives_up_and_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's streams shake hands and are never read."""
    monkeypatch.setattr(tcp_sender, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(
        tcp.ReceivingStream, "_take_frame", lambda self, seal: time.sleep(0.01) or not self._receiver._closing
    )
    spec_rows = torch.zeros(64, 1, 1 << 18)  # 1 MiB a row
    pool = PoolDescription(D, 64, 1 << 20, 1 << 20, L)
    receiver = TcpReceiver(spec_rows, pool, lambda block: GENERATION, "127.0.0.1", b"")
    sender = TcpSender(receiver.describe(), L, b"")
    refs = [BlockRef(D, block, GENERATION) for block in range(64)]
    sender.push("a/0", 0, spec_rows, list(range(64)), refs)
    started = time.monotonic()
    sender.push("b/0", 0, spec_rows, list(range(64)), refs)
    sender.stop("b/0")
    assert time.monotonic() - started < 5
    with pytest.raises(ConnectorError, match="does not take KV bytes: not one byte"):
        sender.flush("a/0")
    sender.flush("b/0")  # nothing of it is left
    sender.close()
    receiver.close()


def test_sender_connects_again_for_the_next_transfer(wire: Wire) -> None:
    sender, source = TcpSender(wire.receiver.describe(), L, KEY), torch.randn(wire.tensor.shape)
    wire.receiver.expect("a/0", REFS)
    sender.push("a/0", 0, source, [0, 2], REFS)
    wait_until(lambda: wire.receiver.bytes_landed("a/0") == 2 * ROW)
    for stream in list(wire.receiver._streams):
        stream.cut()
    wait_until(lambda: not wire.receiver._streams)
    with pytest.raises(ConnectorError, match="does not take KV bytes"):  # what was sent may be lost
        for layer in (0, 0, 0, 0):
            sender.push("a/0", layer, source, [0, 2], REFS)
            time.sleep(0.05)
        sender.flush("a/0")
    sender.stop("a/0")
    wire.receiver.finish("a/0")
    wire.receiver.expect("b/0", REFS)
    for layer in range(LAYERS):
        sender.push("b/0", layer, source, [1, 3], REFS)
    sender.flush("b/0")
    wait_until(lambda: wire.receiver.bytes_landed("b/0") == 2 * LAYERS * ROW)
    assert torch.equal(wire.tensor[[0, 2]], source[[1, 3]])
    sender.close()
    wire.receiver.finish("b/0")
    wire.connect()


@pytest.mark.parametrize("step", ["_copy", "_sum", "_ship"])
def test_what_a_library_raises_ends_a_transfer_and_not_the_stream(
    wire: Wire, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    sender, source = TcpSender(wire.receiver.describe(), L, KEY), torch.randn(wire.tensor.shape)
    with monkeypatch.context() as patched:
        patched.setattr(tcp_sender.SendingStream, step, broken)
        wire.receiver.expect("a/0", REFS)
        with pytest.raises(ConnectorError, match="out of memory"):
            sender.push("a/0", 0, source, [0, 2], REFS)
            sender.flush("a/0")
        sender.stop("a/0")
    wire.receiver.finish("a/0")
    wire.receiver.expect("b/0", REFS)
    sender.push("b/0", 0, source, [1, 3], REFS)
    sender.flush("b/0")
    wait_until(lambda: wire.receiver.bytes_landed("b/0") == 2 * ROW)
    sender.close()
    wire.receiver.finish("b/0")
    wire.connect()


def test_rows_pushed_again_end_as_they_were_last(wire: Wire) -> None:
    """A block that is not full changes while older pushes of it are still queued or on their way."""
    sender, source = TcpSender(wire.receiver.describe(), L, KEY), torch.zeros(wire.tensor.shape)
    wire.receiver.expect("r/0", REFS)
    for round_ in range(300):
        source[:, round_ % LAYERS] = round_
        sender.push("r/0", round_ % LAYERS, source, [0, 1], REFS)
    sender.flush("r/0")
    wait_until(lambda: wire.receiver.bytes_landed("r/0") == 300 * 2 * ROW)
    assert wire.receiver.failure("r/0") is None
    assert torch.equal(wire.tensor[[0, 2]], source[[0, 1]])
    sender.close()
    wire.receiver.finish("r/0")


def test_two_honest_senders_at_once(wire: Wire) -> None:
    """Sequences are of a transfer and its stream, not of a connection."""
    senders = [TcpSender(wire.receiver.describe(), L, KEY) for _ in range(2)]
    source = torch.randn(wire.tensor.shape)
    for i, block in enumerate((0, 2)):
        wire.receiver.expect(f"s{i}/0", ref(block))
    for layer in range(LAYERS):
        for i, block in enumerate((0, 2)):
            senders[i].push(f"s{i}/0", layer, source, [block], ref(block))
    for i, sender in enumerate(senders):
        sender.flush(f"s{i}/0")
    wait_until(lambda: all(wire.receiver.bytes_landed(f"s{i}/0") == LAYERS * ROW for i in range(2)))
    assert torch.equal(wire.tensor[[0, 2]], source[[0, 2]])
    for i, sender in enumerate(senders):
        sender.close()
        wire.receiver.finish(f"s{i}/0")


def test_without_a_key_only_this_machine(wire: Wire) -> None:
    pool = PoolDescription(D, BLOCKS, LAYERS * ROW, ROW, L)
    with pytest.raises(ConnectorError, match="cluster key is needed"):
        TcpReceiver(wire.tensor, pool, lambda block: GENERATION, "192.0.2.1", b"")
    offer = msgspec.msgpack.decode(wire.receiver.describe()) | {"host": "192.0.2.1"}
    with pytest.raises(ConnectorError, match="cluster key is needed"):
        TcpSender(msgspec.msgpack.encode(offer), L, b"")


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "format": junk | st.just(tcp_wire.FORMAT),
        "transfer_id": junk | st.just("r/0"),
        "stream": junk | st.integers(-1, 2),
        "sequence": junk | st.integers(-2, 2),
        "layer": junk | st.integers(-2, LAYERS),
        "blocks": st.lists(st.tuples(st.just(D), st.sampled_from((-2, -1, 1, BLOCKS)), st.integers(0, 4)), max_size=3)
        | junk,
        "length": junk | st.integers(-1, 3 * ROW),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(
        st.tuples(st.binary(max_size=64) | headers, st.binary(max_size=600), st.booleans()), min_size=1, max_size=6
    )
)
def test_nothing_off_is_ever_written(wire: Wire, batch: list[tuple[bytes | dict[str, object], bytes, bool]]) -> None:
    """Blocks of no transfer, or not of this one; sealed or not; payloads that look like frames."""
    wire.tensor.zero_()
    wire.receiver.expect("r/0", REFS)
    for header, payload, sealed in batch:
        if isinstance(header, dict):
            fields = dict(
                format=tcp_wire.FORMAT,
                transfer_id="r/0",
                stream=0,
                sequence=0,
                layer=0,
                blocks=ref(1),
                length=len(payload),
            )
            header = msgspec.msgpack.encode(list((fields | header | {"checksum": 1}).values()))
        try:
            if sealed:
                wire.send(header, payload)
            else:
                wire.socket.sendall(header + payload)
        except OSError:
            break  # the receiver has had enough
    wire.socket.close()
    wire.connect()
    wire.settle()
    wire.receiver.finish("r/0")
    assert not wire.tensor.any()
