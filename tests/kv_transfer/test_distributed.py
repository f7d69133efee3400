"""Pairs, over gloo and NIXL: peers that hang, die or are strangers, and pairs that are made anew."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from optional import needs_nixl

from engine.kv_cache import KVCache, KVCacheSpec
from kv_transfer.connectors import process_group, tcp_sender
from kv_transfer.connectors.base import ConnectorError, PoolDescription, SenderConnector, SenderIdentity
from kv_transfer.connectors.distributed import DistributedReceiver, DistributedSender, ReceivingPair
from kv_transfer.connectors.nixl import NixlReceiver, NixlSender
from kv_transfer.connectors.process_group import RECEIVER, SENDER, Entry, PairStore
from kv_transfer.connectors.tcp_wire import Header, Seal, StreamLost, greet_receiver
from kv_transfer.references import BlockRef
from services.worker.connectors import open_sender

D, KEY = "d" * 32, b"k" * 32
CPU = torch.device("cpu")
KINDS = {"gloo": (DistributedReceiver, DistributedSender), "nixl": (NixlReceiver, NixlSender)}
both_kinds = pytest.mark.parametrize("kind", ["gloo", pytest.param("nixl", marks=needs_nixl)])
SENDER_PROCESS = SenderIdentity("p" * 32, "", 0, 0)
SPEC = KVCacheSpec(num_layers=3, block_size=1024, num_kv_heads=2, head_dim=64, dtype=torch.float32)  # 1 MiB a row


class Pool:
    def __init__(self, kind: str, key: bytes = KEY, num_blocks: int = 8) -> None:
        self.kind = kind
        self.cache = KVCache(SPEC, num_blocks)
        self.generation = [0] * num_blocks
        description = PoolDescription(D, num_blocks, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)
        self.receiver = KINDS[kind][0](self.cache.tensor, description, self.generation.__getitem__, "127.0.0.1", key)

    def expect(self, transfer_id: str, *blocks: int) -> list[BlockRef]:
        for block in blocks:
            self.generation[block] += 1
        refs = [BlockRef(D, block, self.generation[block]) for block in blocks]
        self.receiver.expect(transfer_id, refs)
        return refs

    def command(self, transfer_id: str, refs: list[BlockRef], repeat: int = 1) -> str:
        command = {
            "kind": self.kind,
            "description": self.receiver.describe(),
            "layout": SPEC.layout,
            "shape": list(self.cache.tensor.shape),
            "seed": 3,
            "transfer_id": transfer_id,
            "source_blocks": list(range(len(refs))),
            "blocks": refs,
            "repeat": repeat,
        }
        return msgspec.msgpack.encode(command).hex() + "\n"

    def sender(self, key: bytes = KEY) -> DistributedSender:
        return KINDS[self.kind][1](self.receiver.describe(), SPEC.layout, key, CPU)


@pytest.fixture(params=["gloo", pytest.param("nixl", marks=needs_nixl)])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param)
    yield made
    made.receiver.close()


@pytest.fixture
def source() -> torch.Tensor:
    return torch.randn((8, *KVCache(SPEC, 1).tensor.shape[1:]), generator=torch.Generator().manual_seed(3))


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


def transfer(pool: Pool, sender: DistributedSender, name: str, source: torch.Tensor) -> None:
    refs = pool.expect(name, 6, 1)
    for layer in range(SPEC.num_layers):
        sender.push(name, layer, source, [0, 1], refs)
    sender.flush(name)
    wait_until(lambda: pool.receiver.bytes_landed(name) == 2 * SPEC.block_bytes)
    assert torch.equal(pool.cache.tensor[[6, 1]], source[:2])
    pool.receiver.finish(name)


def test_a_sender_that_hangs_is_shut_out_at_once_and_others_go_on(
    pool: Pool, peer: Any, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the midst of its tensors, again and again; the group that it hangs in is given up."""
    monkeypatch.setattr(process_group, "STUCK_SECONDS", 0.4)
    hung = 0
    for attempt in range(16):
        if hung and attempt >= 4:
            break
        key = f"r{attempt}/0"
        refs = pool.expect(key, 0, 1, 2, 3)
        peer.tell(pool.command(key, refs, repeat=0))
        assert peer.hear() == "pushing\n"
        wait_until(lambda key=key: pool.receiver.bytes_landed(key))
        time.sleep(0.003 * attempt)
        peer.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
        started = time.monotonic()
        assert pool.receiver.fence(key, SENDER_PROCESS)
        assert time.monotonic() - started < 0.3  # it did not wait for the group
        pool.cache.tensor.zero_()  # the blocks have another owner now
        other = pool.sender()
        transfer(pool, other, f"s{attempt}/0", source)
        other.close()
        pool.cache.tensor.zero_()
        time.sleep(0.6)  # whatever waits for the frozen one has given up
        hung += len(pool.receiver._streams) < 2
        peer.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        assert not pool.cache.tensor.any()
        peer.kill()
        wait_until(lambda: not pool.receiver._streams)
    assert hung, "it was never stopped in a tensor"


def test_a_sender_that_dies_costs_one_pair_and_no_thread(pool: Pool, peer: Any, source: torch.Tensor) -> None:
    before = threading.active_count()
    for attempt in range(3):
        refs = pool.expect(f"r{attempt}/0", 0, 1)
        peer.tell(pool.command(f"r{attempt}/0", refs, repeat=0))
        wait_until(lambda attempt=attempt: pool.receiver.bytes_landed(f"r{attempt}/0"))
        peer.kill()
        assert pool.receiver.fence(f"r{attempt}/0", SENDER_PROCESS)
        peer._process = None
    wait_until(lambda: not pool.receiver._streams and threading.active_count() == before)
    sender = pool.sender()
    transfer(pool, sender, "s/0", source)
    sender.close()


def test_a_receiver_that_hangs_fails_the_transfer_and_the_next_has_a_new_pair(
    pool: Pool, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "STUCK_SECONDS", 0.4)
    monkeypatch.setattr(tcp_sender, "STUCK_SECONDS", 0.4)
    sender = pool.sender()
    transfer(pool, sender, "a/0", source)
    hangs = threading.Event()
    take = ReceivingPair._receive

    def receive(self: ReceivingPair, num_bytes: int) -> torch.Tensor:
        if not hangs.is_set():
            hangs.wait(20)
        return take(self, num_bytes)

    monkeypatch.setattr(ReceivingPair, "_receive", receive)
    refs = pool.expect("b/0", 2, 3)
    sender.push("b/0", 0, source, [0, 1], refs)
    started = time.monotonic()
    sender.push("c/0", 0, source, [0, 1], refs)
    sender.stop("c/0")
    with pytest.raises(ConnectorError, match=f"does not take KV bytes: {pool.kind}"):
        sender.flush("b/0")
    assert time.monotonic() - started < 5
    pool.receiver.finish("b/0")
    hangs.set()
    transfer(pool, sender, "d/0", source)
    assert not pool.cache.tensor[[2, 3]].any()
    sender.close()


def test_a_transfer_shut_out_while_its_payload_comes_is_not_written(
    pool: Pool, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ReceivingPair._receive

    def receive(self: ReceivingPair, num_bytes: int) -> torch.Tensor:
        payload = take(self, num_bytes)
        assert pool.receiver.fence("r/0", SENDER_PROCESS)
        return payload

    sender = pool.sender()
    transfer(pool, sender, "a/0", source)
    pool.cache.tensor.zero_()
    monkeypatch.setattr(ReceivingPair, "_receive", receive)
    refs = pool.expect("r/0", 0, 2)
    sender.push("r/0", 0, source, [0, 1], refs)
    sender.flush("r/0")
    wait_until(lambda: pool.receiver.counters.refused.get("unexpected"))
    assert not pool.cache.tensor.any()
    monkeypatch.setattr(ReceivingPair, "_receive", take)
    transfer(pool, sender, "s/0", source)
    sender.close()


def test_a_receiver_without_memory_for_a_payload_fails_the_transfer_at_once(
    pool: Pool, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, empty = pool.sender(), torch.empty
    refs = pool.expect("r/0", 0, 1, 2, 3)
    sender.push("r/0", 0, source, [0], refs[:1])
    wait_until(lambda: pool.receiver.bytes_landed("r/0") == SPEC.layer_bytes)

    def none_left(*args: Any, **options: Any) -> torch.Tensor:
        if threading.current_thread().name == "kv-tcp-stream":
            raise torch.OutOfMemoryError("out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", none_left)
    sender.push("r/0", 0, source, [1, 2, 3], refs[1:])
    wait_until(lambda: pool.receiver.failure("r/0"), 5)
    assert "out of memory" in (pool.receiver.failure("r/0") or "")
    monkeypatch.undo()
    with contextlib.suppress(ConnectorError):  # if it was under way still
        sender.flush("r/0")
    transfer(pool, sender, "s/0", source)  # over another pair
    sender.close()


def test_a_copy_into_pages_that_is_late_is_waited_for_and_delays_the_caller_little(
    pool: Pool, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ends = threading.Event(), threading.Event()
    scatter = ReceivingPair._scatter

    def late(self: ReceivingPair, header: Header, payload: torch.Tensor) -> None:
        began.set()
        assert ends.wait(20)
        scatter(self, header, payload)

    sender = pool.sender()
    transfer(pool, sender, "a/0", source)
    pool.cache.tensor.zero_()
    monkeypatch.setattr(ReceivingPair, "_scatter", late)
    refs = pool.expect("r/0", 0, 2)
    sender.push("r/0", 0, source, [0, 1], refs)
    sender.flush("r/0")
    assert began.wait(20)
    started = time.monotonic()
    assert not pool.receiver.fence("r/0", SENDER_PROCESS)
    assert not pool.receiver.fence("r/0", SENDER_PROCESS)
    assert time.monotonic() - started < 2
    ends.set()
    wait_until(lambda: pool.receiver.fence("r/0", SENDER_PROCESS))
    assert torch.equal(pool.cache.tensor[[0, 2], 0], source[:2, 0])  # so it was over
    pool.cache.tensor.zero_()
    sender.push("r/0", 1, source, [0, 1], refs)
    sender.flush("r/0")
    wait_until(lambda: pool.receiver.counters.refused.get("unexpected"))
    assert not pool.cache.tensor.any()
    sender.close()


def test_a_cache_on_another_kind_of_device_is_refused() -> None:
    pool = Pool("gloo")

    def open_for(device: str, kind: str) -> SenderConnector:
        return open_sender(
            torch.device(device),
            KEY,
            lambda socket, server: None,
            (),
            None,
            SPEC.layout,
            kind,
            pool.receiver.describe(),
        )

    open_for("cpu", "gloo").close()
    with pytest.raises(ConnectorError, match="nccl moves no KV of a cache that lies on cpu"):
        open_for("cpu", "nccl")
    with pytest.raises(ConnectorError, match="gloo moves no KV of a cache that lies on cuda:0"):
        open_for("cuda:0", "gloo")
    pool.receiver.close()


@both_kinds
def test_strangers_get_no_group(kind: str, source: torch.Tensor) -> None:
    with pytest.raises(ConnectorError, match="a cluster key is needed"):
        Pool(kind, b"")
    pool = Pool(kind)
    try:
        with pytest.raises(ConnectorError, match="a cluster key is needed"):
            pool.sender(b"")
        with pytest.raises(ConnectorError, match="another cluster key"):
            pool.sender(b"x" * 32)
        sender = pool.sender()
        transfer(pool, sender, "a/0", source)
        sender.close()
        assert pool.receiver.counters.refused == {"stranger": 1}
    finally:
        pool.receiver.close()


def sealed(*entries: object) -> Callable[[Seal], bytes]:
    return lambda seal: b"".join(seal.close_bytes(msgspec.msgpack.encode(entry)) for entry in entries)


@both_kinds
@pytest.mark.parametrize(
    "said",
    [
        lambda seal: b"\xff" * 200,
        lambda seal: Seal(b"x" * 32).close_bytes(b"\x92\xa1k\xc4\x01v"),
        sealed(["0/1"]),
        sealed([3, b"v"]),
        sealed({"key": "0/1", "value": b"v"}),
        sealed(Entry("", b"")),
        sealed(Entry("0/1", b"\x80\x04\x95."), Entry("", b"")),
        sealed(Entry("k", b"v" * (1 << 17))),
    ],
    ids=["noise", "other seal", "short", "types", "map", "nothing", "garbage", "long"],
)
def test_a_handshake_that_is_off_ends_that_stream_alone(
    kind: str, said: Callable[[Seal], bytes], source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said by one who has the key."""
    monkeypatch.setitem(process_group.JOIN_SECONDS, kind, 2.0)
    pool = Pool(kind)
    try:
        description = msgspec.msgpack.decode(pool.receiver.describe())
        liar = socket.create_connection((description["host"], description["port"]), 10)
        seal = greet_receiver(liar, KEY, D, time.monotonic() + 10)
        liar.settimeout(10)
        liar.sendall(said(seal))
        while liar.recv(1 << 16):
            pass  # its half of the handshake; then the end
        liar.close()
        sender = pool.sender()
        transfer(pool, sender, "a/0", source)
        sender.close()
    except ConnectionResetError:
        pass
    finally:
        pool.receiver.close()


def test_two_ends_of_a_socket_exchange_entries_and_tell_each_other_nothing_after() -> None:
    left, right = socket.socketpair()
    store = PairStore(left, Seal(KEY), RECEIVER, time.monotonic() + 5)
    far = PairStore(right, Seal(KEY), SENDER, time.monotonic() + 5)
    store.set("a", "text")
    far.set("b", b"bytes")
    assert (far.get("a"), store.get("b"), store.get("a")) == (b"text", b"bytes", b"text")
    assert store.check(["a", "b"]) and not store.check(["c"])
    thread = threading.Thread(target=far.finish)
    thread.start()
    store.finish()
    thread.join()
    store.set("late", b"")
    with pytest.raises(StreamLost, match="without 'late'"):
        far.get("late")
    right.setblocking(False)
    with pytest.raises(BlockingIOError):
        right.recv(1)
    left.close()
    right.close()


def test_a_peer_whose_address_swallows_everything_costs_the_deadline_and_no_more(
    source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has told its address over the handshake, and nothing that is sent there is ever answered."""
    monkeypatch.setitem(process_group.JOIN_SECONDS, "gloo", 1.0)
    monkeypatch.setattr(process_group, "STUCK_SECONDS", 1.0)
    hole = socket.socket()
    hole.bind(("127.0.0.1", 0))
    hole.listen(0)
    callers = [socket.socket() for _ in range(4)]  # nobody else gets in
    for caller in callers:
        caller.setblocking(False)
        caller.connect_ex(hole.getsockname())
    pool = Pool("gloo")
    try:
        description = msgspec.msgpack.decode(pool.receiver.describe())
        liar = socket.create_connection((description["host"], description["port"]), 10)
        seal = greet_receiver(liar, KEY, D, time.monotonic() + 10)
        store = PairStore(liar, seal, SENDER, time.monotonic() + 10)
        store._tell(Entry("hello", b""))
        theirs = store.get("0/0")
        # An address as gloo tells it; the port follows the family of the socket's address.
        places = [at for at in range(len(theirs)) if theirs[at : at + 2] == socket.AF_INET.to_bytes(2, "little")]
        assert places, theirs
        lie = bytearray(theirs)
        lie[places[-1] + 2 : places[-1] + 4] = hole.getsockname()[1].to_bytes(2, "big")
        started = time.monotonic()
        store.set("0/1", bytes(lie))
        wait_until(lambda: not pool.receiver._streams, 10)
        assert time.monotonic() - started < 6
        liar.close()
        sender = pool.sender()
        transfer(pool, sender, "a/0", source)
        sender.close()
    finally:
        pool.receiver.close()
        for caller in (*callers, hole):
            caller.close()
