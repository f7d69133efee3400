"""The codec gives every bit back, and packs what is worth it; what cannot be unpacked is never written."""

import math
import os
import socket
import sys
import tracemalloc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from frame_faults import BLOCKS, GENERATION, LAYERS, REFS, ROW, D, L
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from lying_stream import KEY, Wire, message, wait_until

from kv_transfer.connectors import codec_choice
from kv_transfer.connectors.base import PoolDescription, SenderIdentity
from kv_transfer.connectors.codec import CODECS, pack, unpack
from kv_transfer.connectors.codec_choice import CodecChoice
from kv_transfer.connectors.distributed import DistributedReceiver
from kv_transfer.connectors.frames import Refused
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.references import BlockRef

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SENDER = SenderIdentity("p" * 32, "", 0, 0)
FLOATS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def packed(payload: bytes, codec: int) -> bytes:
    return b"".join(pack(np.frombuffer(payload, np.uint8), codec))


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The codec


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=400), st.integers(1, 40))
def test_any_bytes_come_back(codec: int, data: bytes, repeat: int) -> None:
    payload = data * codec * repeat
    assert unpack(memoryview(packed(payload, codec)), codec, len(payload)).tobytes() == payload


@given(st_numpy.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32)))
def test_any_floats_come_back_bit_by_bit(array: np.ndarray) -> None:
    """Numbers of all sizes, zeros and infinities of both signs, quiet and signalling NaN with any payload."""
    odd = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 1 << 31, 1], np.uint32)
    words = np.concatenate((array.view(np.uint32), odd))
    for codec, payload in ((4, words.tobytes()), (2, (words >> 16).astype(np.uint16).tobytes())):
        assert unpack(memoryview(packed(payload, codec)), codec, len(payload)).tobytes() == payload


@pytest.mark.parametrize("codec", CODECS)
def test_floats_are_packed(codec: int) -> None:
    payload = values(0, 1 << 16).to(FLOATS[codec]).view(torch.uint8).numpy().tobytes()
    assert len(packed(payload, codec)) < 0.95 * len(payload)


@settings(deadline=None)
@given(st.sampled_from(CODECS), st.data())
def test_damage_is_refused_or_harmless(codec: int, data: st.DataObject) -> None:
    """Any bit of the packed bytes flipped. What is not noticed here has other bytes, which the frame's sum tells."""
    payload = values(1, 256).to(FLOATS[codec]).view(torch.uint8).numpy().tobytes()
    damaged = bytearray(packed(payload, codec))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        found = unpack(memoryview(damaged), codec, len(payload)).tobytes()
    except Refused as refused:
        assert refused.kind == "codec"
    else:
        assert len(found) == len(payload)


def test_a_bomb_takes_no_memory() -> None:
    """256 MiB of zeros in some kB, and a window that would take half as much."""
    payload = bytes(1 << 16)
    bomb = zstd.compress(bytes(1 << 28)) + bytes(len(payload) // 2)
    window = {zstd.CompressionParameter.compression_level: 1, zstd.CompressionParameter.window_log: 27}
    stream = zstd.ZstdCompressor(options=window)
    wide = stream.compress(payload[: len(payload) // 2]) + stream.flush() + bytes(len(payload) // 2)
    for data in (bomb, wide):
        tracemalloc.start()
        with pytest.raises(Refused):
            unpack(memoryview(data), 2, len(payload))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1 << 20


@pytest.mark.parametrize("change", ["nothing", "cut", "more", "twice", "fewer words", "more words"])
def test_what_stands_for_other_bytes_is_refused(change: str) -> None:
    payload = bytes(range(256)) * 4
    plain, words = len(payload) * 3 // 4, len(payload) // 4
    good = packed(payload, 4)
    top, rest = good[:-plain], good[-plain:]
    data = {
        "nothing": rest,
        "cut": top[:-1] + rest,
        "more": top + b"\0" + rest,
        "twice": top + top + rest,
        "fewer words": zstd.compress(bytes(words - 1)) + rest,
        "more words": zstd.compress(bytes(words + 1)) + rest,
    }[change]
    with pytest.raises(Refused):
        unpack(memoryview(data), 4, len(payload))


# Frames


@pytest.fixture(scope="module")
def shared_wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def wire(shared_wire: Wire) -> Wire:
    shared_wire.tensor.zero_()
    return shared_wire


def packed_message(payload: bytes, word: int = 4, **changes: object) -> tuple[bytes, bytearray]:
    """A good frame of one layer of REFS, packed, but for `changes`."""
    data = packed(payload, word)
    fields = {"length": len(payload), "checksum": xxhash.xxh3_64_intdigest(payload)}
    fields |= {"layers": 1, "codec": word, "packed": len(data)} | changes
    return message(data, **fields)[0], bytearray(data)


def floats(seed: int = 0) -> bytes:
    """One layer of REFS."""
    return values(seed, 2 * ROW // 4).numpy().tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_packed_frames_land(wire: Wire, codec: int) -> None:
    told: list[tuple[int, int]] = []
    wire.receiver.counters.on_unpack = lambda packed, unpacked: told.append((packed, unpacked))
    wire.receiver.expect("r/0", REFS)
    payload = values(codec, 2 * ROW // codec).to(FLOATS[codec]).view(torch.uint8).numpy().tobytes()
    header, data = packed_message(payload, codec)
    wire.send(header, data)
    wire.settle()
    assert wire.tensor[[0, 2], 0].view(torch.uint8).numpy().tobytes() == payload
    assert not wire.tensor[[1, 3]].any() and not wire.tensor[:, 1].any()
    assert wire.receiver.bytes_landed("r/0") == 2 * ROW and told == [(len(data), 2 * ROW)]
    wire.receiver.finish("r/0")
    wire.receiver.counters.on_unpack = None


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_is_written(wire: Wire, codec: int) -> None:
    """Each of many bits of a packed payload, one at a time: refused, counted, and the pages stay as they were."""
    payload = values(2, 2 * ROW // codec).to(FLOATS[codec]).view(torch.uint8).numpy().tobytes()
    header, data = packed_message(payload, codec)
    refused = wire.receiver.counters.refused
    bits = range(0, 8 * len(data), 37)
    before = refused.get("codec", 0) + refused.get("checksum", 0)
    written = 0
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        wire.receiver.expect("r/0", REFS)
        wire.send(header, damaged)
        wait_until(lambda: wire.receiver.failure("r/0") or wire.receiver.bytes_landed("r/0"))
        if wire.receiver.failure("r/0") is None:  # a bit that says nothing: all is as it was sent
            assert wire.tensor[[0, 2], 0].view(torch.uint8).numpy().tobytes() == payload
            written += 1
        else:
            assert not wire.tensor.any() and wire.receiver.bytes_landed("r/0") == 0
        wire.receiver.finish("r/0")
        wire.tensor.zero_()
    wire.settle()
    assert refused.get("codec", 0) + refused.get("checksum", 0) == before + len(bits) - written
    assert written < len(bits) // 20


@pytest.mark.parametrize(
    "changes",
    [
        {"packed": 0},
        {"packed": -1},
        {"packed": 2 * ROW},
        {"packed": 2**62},
        {"codec": 3},
        {"codec": 8},
        {"codec": -1},
        {"length": 2 * ROW - 1},
    ],
    ids=str,
)
def test_headers_that_lie_end_the_stream(wire: Wire, changes: dict[str, object]) -> None:
    before = wire.receiver.counters.refused.get("malformed", 0)
    wire.receiver.expect("r/0", REFS)
    wire.send(*packed_message(floats(), **changes))
    wait_until(lambda: wire.receiver.counters.refused.get("malformed", 0) == before + 1)
    assert not wire.tensor.any()
    wire.settle()
    wire.receiver.finish("r/0")


def test_a_packed_frame_of_nobody_is_dropped_whole(wire: Wire) -> None:
    before = wire.receiver.counters.refused.get("unexpected", 0)
    wire.send(*packed_message(floats(), transfer_id="nobody/0"))
    wire.receiver.expect("r/0", REFS)
    wire.send(*packed_message(floats(3)))  # the stream has not lost its place
    wait_until(lambda: wire.receiver.bytes_landed("r/0"))
    assert wire.receiver.counters.refused["unexpected"] == before + 1
    assert wire.tensor[[0, 2], 0].view(torch.uint8).numpy().tobytes() == floats(3)
    wire.receiver.finish("r/0")


def test_fence_in_the_middle_of_a_packed_frame_holds(wire: Wire) -> None:
    wire.receiver.expect("r/0", REFS)
    before = wire.receiver.counters.refused.get("unexpected", 0)
    header, data = packed_message(floats())
    wire.socket.sendall(wire.liar.seal(header) + data[:-8])
    wait_until(lambda: not _has_bytes(wire))
    assert wire.receiver.fence("r/0", SENDER)
    wire.receiver.expect("s/0", REFS)  # the blocks have another owner
    wire.socket.sendall(data[-8:])
    wait_until(lambda: wire.receiver.counters.refused.get("unexpected", 0) == before + 1)
    assert not wire.tensor.any() and wire.receiver.bytes_landed("s/0") == 0
    wire.send(*packed_message(floats(4), transfer_id="s/0"))
    wait_until(lambda: wire.receiver.bytes_landed("s/0") == 2 * ROW)
    wire.receiver.finish("s/0")


def _has_bytes(wire: Wire) -> bool:
    """Whether something that was sent has not been read by the receiver."""
    for stream in list(wire.receiver._streams):
        try:
            if stream._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            pass
    return False


def test_fence_holds_while_packed_frames_are_written(wire: Wire) -> None:
    """Whenever the fence comes, not a byte comes after it."""
    for attempt in range(60):
        key = f"f{attempt}/0"
        wire.receiver.expect(key, REFS)
        for sequence in range(20):
            wire.send(*packed_message(floats(5), transfer_id=key, sequence=sequence))
        if attempt % 3:
            wait_until(lambda: bool(wire.tensor.any()))
        assert wire.receiver.fence(key, SENDER)
        wire.tensor.zero_()
        wire.settle()
        assert not wire.tensor.any()


# Both sides


def slow_sender(wire: Wire, **options: object) -> TcpSender:
    """One to which the link seems to carry a kB a second."""
    sender = TcpSender(wire.receiver.describe(), L, KEY, **options)  # type: ignore[arg-type]
    sender._choice.link.add(codec_choice._ENOUGH_BYTES, codec_choice._ENOUGH_BYTES / 1000)
    return sender


def push(wire: Wire, sender: TcpSender, key: str, times: int = 20) -> torch.Tensor:
    source = values(6, *wire.tensor.shape)
    wire.receiver.expect(key, REFS)
    for layer in list(range(LAYERS)) * times:
        sender.push(key, layer, source, [1, 3], REFS)
    sender.flush(key)
    wait_until(lambda: wire.receiver.bytes_landed(key) == times * 2 * LAYERS * ROW)
    assert wire.receiver.failure(key) is None
    wire.receiver.finish(key)
    return source


def test_a_sender_packs_for_a_slow_link(wire: Wire) -> None:
    told: list[tuple[int, int]] = []
    wire.receiver.counters.on_unpack = lambda packed, unpacked: told.append((packed, unpacked))
    sender = slow_sender(wire)
    source = push(wire, sender, "p/0")
    assert torch.equal(wire.tensor[[0, 2]], source[[1, 3]])
    assert told and all(packed < unpacked for packed, unpacked in told)
    assert "packed" in sender.condition()
    sender.close()
    wire.receiver.counters.on_unpack = None


@pytest.mark.parametrize("who", ["sender", "receiver", "older receiver"])
def test_a_peer_without_the_codec_gets_plain_bytes(wire: Wire, who: str) -> None:
    told: list[tuple[int, int]] = []
    tensor = torch.zeros_like(wire.tensor)
    pool = PoolDescription(D, BLOCKS, LAYERS * ROW, ROW, L)
    codecs = () if who == "receiver" else CODECS
    receiver = TcpReceiver(tensor, pool, lambda block: GENERATION, "127.0.0.1", KEY, codecs)
    receiver.counters.on_unpack = lambda packed, unpacked: told.append((packed, unpacked))
    description = msgspec.msgpack.decode(receiver.describe())
    if who == "older receiver":
        del description["codecs"]
    sender = TcpSender(msgspec.msgpack.encode(description), L, KEY, () if who == "sender" else CODECS)
    sender._choice.link.add(codec_choice._ENOUGH_BYTES, codec_choice._ENOUGH_BYTES / 1000)
    receiver.expect("r/0", REFS)
    source = values(7, *tensor.shape)
    for layer in list(range(LAYERS)) * 20:
        sender.push("r/0", layer, source, [1, 3], REFS)
    sender.flush("r/0")
    wait_until(lambda: receiver.bytes_landed("r/0") == 40 * 2 * ROW)
    assert torch.equal(tensor[[0, 2]], source[[1, 3]]) and not told
    sender.close()
    receiver.close()


def test_a_codec_that_was_not_offered_is_refused(wire: Wire) -> None:
    bare = Wire(codecs=())
    bare.receiver.expect("r/0", REFS)
    bare.send(*packed_message(floats()))
    wait_until(lambda: bare.receiver.counters.refused.get("malformed") == 1)
    assert not bare.tensor.any()
    bare.close()


def test_torch_distributed_offers_none(wire: Wire) -> None:
    pool = PoolDescription(D, BLOCKS, LAYERS * ROW, ROW, L)
    receiver = DistributedReceiver(wire.tensor, pool, lambda block: GENERATION, "127.0.0.1", KEY)
    assert msgspec.msgpack.decode(receiver.describe())["codecs"] == []
    receiver.close()


def test_a_fast_link_gets_plain_bytes(wire: Wire) -> None:
    """As measured on this machine's loopback, which no codec keeps up with unless something else has the cores."""
    told: list[tuple[int, int]] = []
    spec_rows = torch.zeros(64, 1, 1 << 16)  # 256 KiB a row
    pool = PoolDescription(D, 64, 1 << 18, 1 << 18, L)
    receiver = TcpReceiver(spec_rows, pool, lambda block: GENERATION, "127.0.0.1", KEY)
    receiver.counters.on_unpack = lambda packed, unpacked: told.append((packed, unpacked))
    sender, source = TcpSender(receiver.describe(), L, KEY), values(8, *spec_rows.shape)
    refs = [BlockRef(D, block, GENERATION) for block in range(64)]
    for round_ in range(4):
        receiver.expect(f"r{round_}/0", refs)
        sender.push(f"r{round_}/0", 0, source, list(range(64)), refs)
        sender.flush(f"r{round_}/0")
        wait_until(lambda key=f"r{round_}/0": receiver.bytes_landed(key) == 64 << 18)
        receiver.finish(f"r{round_}/0")
    assert torch.equal(spec_rows, source)
    assert sum(unpacked for _, unpacked in told) < 4 * (64 << 18) / 2
    sender.close()
    receiver.close()


# The choice


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> CodecChoice:
    """Of a codec that packs to 80 % at 100 MB/s."""
    monkeypatch.setattr(codec_choice, "_LOOK_SECONDS", 0.0)
    made = CodecChoice(CODECS, 1)
    made.codec.add(100_000_000, 1.0, 80_000_000)
    return made


def look(choice: CodecChoice, speed: float, num_bytes: int = 100_000_000) -> bool:
    choice.look([lambda: (num_bytes, num_bytes / speed)])
    return choice.in_use


def test_packs_while_that_is_quicker(choice: CodecChoice) -> None:
    """1 / link > 1 / codec + ratio / link up to a link of 20 MB/s; to begin, 5 % must be gained: 15 MB/s."""
    assert not look(choice, 30e6)
    assert not look(choice, 16e6)
    assert look(choice, 14e6)
    assert look(choice, 16e6)
    assert look(choice, 19e6)
    assert not look(choice, 21e6)
    assert not look(choice, 16e6)
    assert look(choice, 14e6)
    assert not look(choice, 2e9)


def test_a_link_is_judged_after_enough_bytes_or_time(choice: CodecChoice) -> None:
    assert not look(choice, 1e6, 1000)
    assert "not measured" in str(choice)
    assert look(choice, 1e6, 1 << 20)
    choice = CodecChoice(CODECS, 1)
    choice.codec.add(100_000_000, 1.0, 80_000_000)
    assert look(choice, 1e4, 10_000)


def test_streams_share_a_link(choice: CodecChoice) -> None:
    choice.look([lambda: (8_000_000, 1.0), lambda: (8_000_000, 0.9), lambda: (0, 0.0)])
    assert choice.link.speed == 16e6


def test_pauses_tell_nothing_but_that_a_link_is_fast(choice: CodecChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(codec_choice.time, "monotonic", lambda: now)
    choice._looked = 0.0  # there was little to send in all the time since
    assert not look(choice, 1e6) and not choice.link.bytes
    now += 100.0
    assert look(choice, 1e6)
    now += 1e6
    assert look(choice, 1e5) and choice.link.speed == 1e6
    now += 1e6
    assert not look(choice, 1e9)


def test_a_link_that_carries_all_at_once_is_fast(choice: CodecChoice) -> None:
    assert look(choice, 5e6)
    for _ in range(5):
        look(choice, math.inf)
    assert not choice.in_use and "plain" in str(choice)


def test_what_does_not_get_smaller_goes_plain() -> None:
    choice = CodecChoice(CODECS, 1)
    look(choice, 1000)
    noise = np.frombuffer(os.urandom(1 << 16), np.uint8)
    for _ in range(10):
        assert choice.pack(noise, 4) is None
    assert not choice.in_use


def test_payloads_are_tried_now_and_then(choice: CodecChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = codec_choice.pack

    def counted(payload: np.ndarray, codec: int) -> list[memoryview]:
        tried.append(codec)
        return real(payload, codec)

    monkeypatch.setattr(codec_choice, "pack", counted)
    payload = np.zeros(4096, np.uint8)
    assert choice.pack(payload, 4) is None and not tried  # nothing is known of the link
    look(choice, 1e12)
    assert choice.pack(payload, 4) is None and not tried  # nothing can be gained
    look(choice, 60e6)
    for _ in range(10):
        assert choice.pack(payload, 4) is None
    assert len(tried) == codec_choice._TRIALS
    choice._trial_due = 0.0
    for _ in range(10):
        assert choice.pack(payload, 4) is None
    assert len(tried) == codec_choice._TRIALS + 1
    assert choice.pack(payload, 8) is None  # a codec that the peer does not know
