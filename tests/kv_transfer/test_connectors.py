"""The connectors between real processes: bytes arrive whole, dead and frozen senders are shut out, nothing is left."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from optional import needs_nixl

from engine.kv_cache import KVCache, KVCacheSpec
from kv_transfer.connectors import shared_memory
from kv_transfer.connectors.base import (
    ConnectorError,
    PoolDescription,
    ReceiverConnector,
    SenderConnector,
    SenderIdentity,
)
from kv_transfer.connectors.distributed import DistributedReceiver, DistributedSender
from kv_transfer.connectors.lent_memory import Lent, LentReceiver, LentSender
from kv_transfer.connectors.nixl import NixlReceiver, NixlSender
from kv_transfer.connectors.selection import Selection
from kv_transfer.connectors.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedSegment,
    reap_stale_segments,
)
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import ZmqReceiver, ZmqSender
from kv_transfer.references import BlockRef

INCARNATION = "d" * 32
SENDER = SenderIdentity("p" * 32, "", 0, 0)
KINDS = ["shared_memory", "lent_memory", "tcp", "zmq", "gloo", pytest.param("nixl", marks=needs_nixl)]


def plain(socket: zmq.Socket[bytes], server: bool) -> None:
    """No CURVE."""


@dataclass
class Pool:
    """A decode worker's side: memory, generations, connector."""

    cache: KVCache
    receiver: ReceiverConnector
    generation: list[int]
    segments: list[SharedSegment] = field(default_factory=list)

    def hand_out(self, *blocks: int) -> list[BlockRef]:
        for block in blocks:
            self.generation[block] += 1
        return [BlockRef(INCARNATION, block, self.generation[block]) for block in blocks]

    @property
    def shape(self) -> list[int]:
        return list(self.cache.tensor.shape)

    def command(self, transfer_id: str, refs: list[BlockRef], **more: object) -> str:
        command = {
            "kind": self.receiver.capabilities.kind,
            "description": self.receiver.describe(),
            "layout": self.cache.spec.layout,
            "shape": self.shape,
            "seed": 3,
            "transfer_id": transfer_id,
            "source_blocks": list(range(len(refs))),
            "blocks": refs,
        }
        return msgspec.msgpack.encode(command | more).hex() + "\n"


def make_pool(kind: str, num_blocks: int = 8, block_size: int = 4) -> Pool:
    spec = KVCacheSpec(num_layers=3, block_size=block_size, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    pool = PoolDescription(INCARNATION, num_blocks, spec.block_bytes, spec.layer_bytes, spec.layout)
    generation = [0] * num_blocks
    if kind == "shared_memory":
        segment = SharedSegment(num_blocks * spec.block_bytes, num_blocks)
        cache = KVCache(spec, num_blocks, segment.buffer)
        return Pool(cache, SharedMemoryReceiver(segment, pool), generation, [segment])
    cache = KVCache(spec, num_blocks)
    receiver: ReceiverConnector
    if kind == "lent_memory":
        receiver = LentReceiver(cache, pool, generation.__getitem__, "127.0.0.1", b"")
        source = SharedSegment(num_blocks * spec.block_bytes, num_blocks)  # of senders in this process
        return Pool(cache, receiver, generation, [source])
    if kind == "nixl":
        receiver = NixlReceiver(cache.tensor, pool, generation.__getitem__, "127.0.0.1", b"k" * 32)
    elif kind == "gloo":
        receiver = DistributedReceiver(cache.tensor, pool, generation.__getitem__, "127.0.0.1", b"k" * 32)
    elif kind == "tcp":
        receiver = TcpReceiver(cache.tensor, pool, generation.__getitem__, "127.0.0.1", b"")
    else:
        receiver = ZmqReceiver(cache.tensor, pool, generation.__getitem__, "127.0.0.1", plain)
    return Pool(cache, receiver, generation)


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = make_pool(request.param)
    yield made
    made.receiver.close()
    for segment in made.segments:
        segment.unlink()


@pytest.fixture
def shm_pool() -> Iterator[Pool]:
    made = make_pool("shared_memory")
    yield made
    made.receiver.close()


def kind_of(pool: Pool) -> str:
    return pool.receiver.capabilities.kind


def open_offer(kind: str, description: bytes, layout: str, lent: Lent | None = None) -> SenderConnector:
    if kind == "lent_memory":
        return LentSender(description, layout, b"", lent)
    if kind == "nixl":
        return NixlSender(description, layout, b"k" * 32, torch.device("cpu"))
    if kind == "gloo":
        return DistributedSender(description, layout, b"k" * 32, torch.device("cpu"))
    if kind == "tcp":
        return TcpSender(description, layout, b"")
    return ZmqSender(description, layout, plain) if kind == "zmq" else SharedMemorySender(description, layout)


def open_sender(pool: Pool) -> SenderConnector:
    return open_offer(kind_of(pool), pool.receiver.describe(), pool.cache.spec.layout, lendable(pool))


def lendable(pool: Pool) -> Lent | None:
    """What a sender in this process lends."""
    if kind_of(pool) != "lent_memory":
        return None
    spec, (segment,) = pool.cache.spec, pool.segments
    pages = KVCache(spec, pool.cache.num_blocks, segment.buffer).tensor
    described = PoolDescription("sender", len(pages), spec.block_bytes, spec.layer_bytes, spec.layout)
    return Lent(pages, segment.describe(described))


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


def source_cache(pool: Pool) -> torch.Tensor:
    source = torch.randn(pool.shape, generator=torch.Generator().manual_seed(3))
    lent = lendable(pool)
    return source if lent is None else lent.pages.copy_(source)


# Two processes


def test_bytes_arrive_whole_and_nowhere_else(pool: Pool, peer: Any) -> None:
    refs = pool.hand_out(6, 1, 4)
    pool.receiver.expect("r/0", refs)
    peer.tell(pool.command("r/0", refs))
    assert peer.hear() == "pushing\n"
    total = 3 * pool.cache.spec.block_bytes
    assert peer.hear() == f"pushed {total}\n"
    if not pool.receiver.capabilities.one_sided:
        wait_until(lambda: pool.receiver.bytes_landed("r/0") == total)
    assert torch.equal(pool.cache.tensor[[6, 1, 4]], source_cache(pool)[:3])
    assert not pool.cache.tensor[[0, 2, 3, 5, 7]].any()
    assert pool.receiver.failure("r/0") is None


def test_sender_killed_in_the_middle_is_fenced(pool: Pool, peer: Any) -> None:
    refs = pool.hand_out(0, 1, 2, 3)
    pool.receiver.expect("r/0", refs)
    peer.tell(pool.command("r/0", refs, repeat=0))
    assert peer.hear() == "pushing\n"
    wait_until(lambda: bool(pool.cache.tensor[0, 0].any()))
    peer.kill()
    assert pool.receiver.fence("r/0", SENDER)
    pool.cache.tensor.zero_()
    time.sleep(0.05)  # what sockets still hold comes now
    assert not pool.cache.tensor.any()


def test_frozen_sender_cannot_write_once_fence_says_so(peer: Any) -> None:
    """Frozen in the middle of a write it is not fenced, until it has ended; frozen elsewhere it is, and stays out."""
    pool = make_pool("shared_memory", num_blocks=16, block_size=4096)  # 6 MiB a layer: nearly always in a write
    try:
        refs = pool.hand_out(*range(16))
        seen_busy = False
        for attempt in range(50):
            key = f"r{attempt}/0"
            pool.receiver.expect(key, refs)
            peer.tell(pool.command(key, refs, repeat=0))
            assert peer.hear() == "pushing\n"
            time.sleep(0.01)
            peer.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
            fenced = pool.receiver.fence(key, SENDER)
            if not fenced:
                seen_busy = True
                time.sleep(0.05)
                assert not pool.receiver.fence(key, SENDER)
            peer.process.send_signal(signal.SIGCONT)
            if not fenced:
                wait_until(lambda key=key: pool.receiver.fence(key, SENDER))
            pool.cache.tensor.zero_()  # the blocks have another owner now
            assert peer.hear().startswith("refused")
            assert not pool.cache.tensor.any()
            if seen_busy and attempt >= 3:
                break
        assert seen_busy
    finally:
        pool.receiver.close()


def test_segment_of_a_killed_owner_is_reaped_and_no_other(peer: Any, shm_pool: Pool) -> None:
    peer.tell("own\n")
    name = peer.hear().strip()
    path = Path("/dev/shm") / name
    assert path.exists() and path.stat().st_mode & 0o777 == 0o600
    assert name not in reap_stale_segments()
    peer.kill()
    assert name in reap_stale_segments() and not path.exists()
    assert (Path("/dev/shm") / shm_pool.segments[0].name).exists()


# One process


def test_finished_and_stale_and_foreign_references_are_refused(shm_pool: Pool) -> None:
    sender, source = open_sender(shm_pool), source_cache(shm_pool)
    old = shm_pool.hand_out(2)
    shm_pool.receiver.expect("a/0", old)
    sender.push("a/0", 0, source, [0], old)
    shm_pool.receiver.finish("a/0")
    shm_pool.cache.tensor.zero_()
    refused = [
        old,  # finished
        [BlockRef(INCARNATION, 3, 0)],  # never handed out
        [BlockRef("e" * 32, 2, 1)],
        [BlockRef(INCARNATION, -1, 1)],
        [BlockRef(INCARNATION, 8, 1)],
        [BlockRef(INCARNATION, 2**63, 1)],
        [BlockRef(INCARNATION, 2, -1)],
        [BlockRef(INCARNATION, 2, 2**64)],
        [BlockRef(INCARNATION, 2, 2**64 - 1)],  # the word for "none" in the table, were it believed
    ]
    for refs in refused[:-1]:
        with pytest.raises(ConnectorError):
            sender.push("a/0", 0, source, [0], refs)
    new = shm_pool.hand_out(2)
    shm_pool.receiver.expect("b/0", new)
    with pytest.raises(ConnectorError):
        sender.push("a/0", 0, source, [0], old)
    for refs in refused:
        with pytest.raises(ConnectorError):
            sender.push("a/0", 0, source, [0], refs)
    assert not shm_pool.cache.tensor.any()
    assert sender.counters.refused == {"generation": 10, "incarnation": 2, "range": 6}
    shm_pool.receiver.finish("a/0")  # a second time: b is not touched
    assert sender.push("b/0", 0, source, [0], new) == shm_pool.cache.spec.layer_bytes
    sender.close()
    sender.close()
    with pytest.raises(ConnectorError, match="closed"):
        sender.push("b/0", 0, source, [0], new)


@pytest.mark.parametrize(("layer", "source_blocks"), [(-1, [0]), (3, [0]), (0, [8]), (0, [-1]), (0, [0, 1]), (0, [])])
def test_push_outside_of_the_cache_is_refused(pool: Pool, layer: int, source_blocks: list[int]) -> None:
    refs = pool.hand_out(0)
    pool.receiver.expect("r/0", refs)
    sender = open_sender(pool)
    with pytest.raises(ConnectorError, match="does not fit"):
        sender.push("r/0", layer, source_cache(pool), source_blocks, refs)
    with pytest.raises(ConnectorError, match="does not fit"):
        sender.push("r/0", 0, source_cache(pool)[:, :, :2], [0], refs)
    sender.close()
    assert not pool.cache.tensor.any()


def test_other_layout_and_malformed_offers_are_refused(pool: Pool) -> None:
    kind, good, lent = kind_of(pool), msgspec.msgpack.decode(pool.receiver.describe()), lendable(pool)

    with pytest.raises(ConnectorError, match="layout"):
        open_offer(kind, pool.receiver.describe(), "other", lent)
    wrong: list[tuple[str, object]] = [("num_blocks", 0), ("num_blocks", -1), ("num_blocks", 2**63), ("block_bytes", 0)]
    wrong += [("layer_bytes", 7), ("layout", 3)]
    bad: list[dict[str, object]] = [{"pool": {**good["pool"], key: value}} for key, value in wrong]
    if kind == "zmq":
        bad += [
            {"address": address} for address in ("", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://127.0.0.1:x", 3)
        ]
    elif kind in ("tcp", "gloo", "nixl", "lent_memory"):
        bad += [{"boot_id": "other"}] if kind == "lent_memory" else []
        bad += [{"host": host} for host in ("", "localhost", "192.0.2.1", "::ffff:192.0.2.1", "127.0.0.1:1", "/", 3)]
        bad += [{"port": port} for port in (0, -1, 1 << 16, "http", 1)]  # nobody listens on port 1
    else:
        bad += [{"name": name} for name in ("", "../etc/passwd", "tandem-kv-\0", "tandem-kv-/../x", good["name"][:-1])]
        bad += [{"token": token} for token in (b"", b"x" * 32, b"x" * 10_000)]
        bad += [{"boot_id": "other"}, {"pool": {**good["pool"], "num_blocks": 7}}]
    for change in bad:
        with pytest.raises(ConnectorError):
            open_offer(kind, msgspec.msgpack.encode(good | change), pool.cache.spec.layout, lent)
    for garbage in (b"", b"\x80\x04\x95.", os.urandom(100), msgspec.msgpack.encode([good])):
        with pytest.raises(ConnectorError):
            open_offer(kind, garbage, pool.cache.spec.layout, lent)


def test_too_little_shared_memory_is_said_with_numbers() -> None:
    with pytest.raises(ConnectorError, match=r"needs \d+ MiB of /dev/shm and \d+ MiB are free"):
        SharedSegment(1 << 50, 8)


def test_segment_that_a_reaper_took_at_birth_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reaper comes between creation and lock: the first file is gone, the owner must notice."""
    try_lock, reaped = shared_memory._try_lock, []

    def reap_first(descriptor: int, byte: int) -> bool:
        if not reaped:
            reaped.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.unlink(reaped[0])
        return try_lock(descriptor, byte)

    monkeypatch.setattr(shared_memory, "_try_lock", reap_first)
    segment = SharedSegment(4096, 1)
    assert reaped and (Path("/dev/shm") / segment.name).exists()
    segment.unlink()
    segment.unlink()


def test_fencing_one_transfer_leaves_the_others_alone(pool: Pool) -> None:
    a, b = pool.hand_out(0), pool.hand_out(1)
    pool.receiver.expect("a/0", a)
    pool.receiver.expect("b/0", b)
    assert pool.receiver.fence("a/0", SENDER) and pool.receiver.fence("a/0", SENDER)
    assert pool.receiver.fence("never seen/0", SENDER)
    sender, source = open_sender(pool), source_cache(pool)
    for layer in range(3):
        sender.push("b/0", layer, source, [5], b)
    sender.flush("b/0")
    wait_until(lambda: torch.equal(pool.cache.tensor[1], source[5]))
    sender.close()


@pytest.mark.parametrize("kind", ["tcp", "zmq"])
def test_sender_to_nobody_neither_blocks_nor_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is gone: pushes return at once, flush says so, stop and close end."""
    monkeypatch.setattr("kv_transfer.connectors.zmq_stream._STUCK_SECONDS", 0.2)
    pool = make_pool(kind)
    sender, source = open_sender(pool), source_cache(pool)
    pool.receiver.close()
    with pytest.raises(ConnectorError, match="does not take"):  # TCP may know it while pushes go on
        for layer in range(200):
            sender.push("r/0", layer % 3, source, list(range(8)), pool.hand_out(*range(8)))
        sender.flush("r/0")
    sender.stop("r/0")
    sender.flush("r/0")  # nothing of it is left
    sender.close()
    with pytest.raises(ConnectorError, match="closed"):
        sender.push("r/0", 0, source, [0], pool.hand_out(0))


def test_zmq_with_curve_keeps_strangers_out() -> None:
    public, secret = zmq.curve_keypair()

    def curve(socket: zmq.Socket[bytes], server: bool) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, public)

    spec = KVCacheSpec(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    cache = KVCache(spec, 8)
    description = PoolDescription(INCARNATION, 8, spec.block_bytes, spec.layer_bytes, spec.layout)
    receiver = ZmqReceiver(cache.tensor, description, lambda block: 1, "127.0.0.1", curve)
    refs = [BlockRef(INCARNATION, 0, 1)]
    receiver.expect("r/0", refs)
    source = torch.randn(cache.tensor.shape).to(torch.bfloat16)
    for attempt in range(40):  # the connection goes at every moment of a send: the sender's thread must still end
        stranger = ZmqSender(receiver.describe(), spec.layout, plain)
        for layer in range(30):
            stranger.push("r/0", layer % 3, -source, [1], refs)
        time.sleep(0.001 * (attempt % 12))
        stranger.stop("r/0")
        stranger.close()
    stranger = ZmqSender(receiver.describe(), spec.layout, plain)
    friend = ZmqSender(receiver.describe(), spec.layout, curve)
    stranger.push("r/0", 0, -source, [1], refs)
    friend.push("r/0", 0, source, [1], refs)
    wait_until(lambda: receiver.bytes_landed("r/0") == spec.layer_bytes)
    assert torch.equal(cache.tensor[0, 0], source[1, 0])
    for connector in (stranger, friend, receiver):
        connector.close()


def test_choice_takes_the_first_offer_that_works_and_says_why() -> None:
    pool, unreachable = make_pool("zmq"), make_pool("tcp")
    layout = pool.cache.spec.layout

    def open_connector(kind: str, description: bytes) -> SenderConnector:
        return open_offer(kind, description, layout)

    offers = [("shared_memory", b"from another host"), ("tcp", unreachable.receiver.describe())]
    offers.append(("zmq", pool.receiver.describe()))
    selection = Selection(offers, open_connector)
    assert selection.current.kind == "tcp" and "shared_memory: malformed" in selection.current.reason
    selection.close()
    unreachable.receiver.close()
    selection = Selection(offers, open_connector)
    assert selection.current.kind == "zmq" and "tcp: cannot connect" in selection.current.reason
    selection.close()
    with pytest.raises(ConnectorError, match="shared_memory is forced"):
        Selection(offers, open_connector, forced="shared_memory")
    with pytest.raises(ConnectorError, match="none was offered"):
        Selection([], open_connector)
    pool.receiver.close()


def test_a_pool_that_gave_its_pages_back_is_written_again(peer: Any) -> None:
    """The receiver slept and woke; a sender's mapping still leads there, and so does the table of generations."""
    pool = make_pool("shared_memory", block_size=256)
    (segment,) = pool.segments
    file = Path("/dev/shm") / segment.name
    first = pool.hand_out(2)
    pool.receiver.expect("r/0", first)
    sender = open_sender(pool)
    source = source_cache(pool)
    assert sender.push("r/0", 0, source, [0], first)
    pool.receiver.finish("r/0")
    taken = file.stat().st_blocks
    segment.release()
    assert file.stat().st_blocks * 512 < segment.pool_bytes / 8
    segment.reserve()
    assert file.stat().st_blocks == taken and not pool.cache.tensor.any()
    with pytest.raises(ConnectorError, match="does not expect"):
        sender.push("r/0", 0, source, [0], first)
    again = pool.hand_out(2)
    pool.receiver.expect("r/1", again)
    for layer in range(3):
        sender.push("r/1", layer, source, [0], again)
    assert torch.equal(pool.cache.tensor[2], source[0])
    sender.close()
    pool.receiver.close()
    with pytest.raises(ConnectorError, match="/dev/shm has no"):
        segment.reserve()  # it is gone
