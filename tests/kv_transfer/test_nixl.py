"""NIXL as a connector, beside what it has in common with other pairs (test_distributed)."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from optional import needs_nixl

from engine.kv_cache import KVCache, KVCacheSpec
from kv_transfer.connectors import nixl, process_group
from kv_transfer.connectors.base import ConnectorError, PoolDescription, SenderIdentity
from kv_transfer.connectors.nixl import NixlPair, NixlReceiver, NixlSender
from kv_transfer.connectors.process_group import SENDER, Entry, PairStore
from kv_transfer.connectors.tcp_wire import StreamLost, greet_receiver
from kv_transfer.references import BlockRef
from services.config import ConfigError, WorkerConfig
from services.worker.connectors import check_connector

D, KEY, CPU = "d" * 32, b"k" * 32, torch.device("cpu")
NOBODY = SenderIdentity("p" * 32, "", 0, 0)
SPEC = KVCacheSpec(num_layers=3, block_size=1024, num_kv_heads=2, head_dim=64, dtype=torch.float32)  # 1 MiB a row


class Pool:
    def __init__(self) -> None:
        self.cache = KVCache(SPEC, 8)
        self.generation = [0] * 8
        description = PoolDescription(D, 8, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)
        self.receiver = NixlReceiver(self.cache.tensor, description, self.generation.__getitem__, "127.0.0.1", KEY)

    def expect(self, transfer_id: str, *blocks: int) -> list[BlockRef]:
        for block in blocks:
            self.generation[block] += 1
        refs = [BlockRef(D, block, self.generation[block]) for block in blocks]
        self.receiver.expect(transfer_id, refs)
        return refs

    def transfer(self, name: str) -> None:
        """Over streams of its own."""
        source = torch.randn(self.cache.tensor.shape, generator=torch.Generator().manual_seed(5))
        sender = NixlSender(self.receiver.describe(), SPEC.layout, KEY, CPU)
        refs = self.expect(name, 6, 1)
        for layer in range(SPEC.num_layers):
            sender.push(name, layer, source, [0, 1], refs)
        sender.flush(name)
        wait_until(lambda: self.receiver.bytes_landed(name) == 2 * SPEC.block_bytes)
        assert torch.equal(self.cache.tensor[[6, 1]], source[:2])
        self.receiver.finish(name)
        sender.close()

    def greet(self) -> tuple[socket.socket, PairStore]:
        """A stream to the receiver of one who has the key, and what they tell each other over it."""
        description = msgspec.msgpack.decode(self.receiver.describe())
        stream = socket.create_connection((description["host"], description["port"]), 10)
        seal = greet_receiver(stream, KEY, D, time.monotonic() + 10)
        return stream, PairStore(stream, seal, SENDER, time.monotonic() + 10)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.receiver.close()


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


@needs_nixl
@pytest.mark.parametrize(
    "loan",
    [
        b"",
        b"\x80\x04\x95.",
        msgspec.msgpack.encode([1 << 40, 1 << 20, 0]),
        msgspec.msgpack.encode(["0", 1 << 20, 0, b""]),
        msgspec.msgpack.encode([1 << 40, 1 << 20, 0, b""]),
        msgspec.msgpack.encode([1 << 40, 1 << 20, 0, b"nobody"]),
        msgspec.msgpack.encode([-1, -1, -1, b"\0" * 4096]),
    ],
    ids=["empty", "noise", "short", "types", "no agent", "agent", "numbers"],
)
def test_a_loan_that_makes_no_sense_ends_that_stream_alone(pool: Pool, loan: bytes) -> None:
    """Told by one who has the key."""
    stream, store = pool.greet()
    store._tell(Entry("joins", b""))
    store._tell(Entry("loan", loan))
    wait_until(lambda: not pool.receiver._streams)
    stream.close()
    pool.transfer("a/0")


@needs_nixl
def test_what_is_not_lent_is_not_read(pool: Pool) -> None:
    """A true agent that lends other memory than it says."""
    stream, store = pool.greet()
    store._tell(Entry("joins", b""))
    agent = nixl._make_agent(stream)
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    agent.register_memory([memory])
    loan = [memory.data_ptr() + (1 << 30), 1 << 20, 0, agent.get_agent_metadata()]
    store._tell(Entry("loan", msgspec.msgpack.encode(loan)))
    wait_until(lambda: not pool.receiver._streams)
    stream.close()
    pool.transfer("a/0")


@needs_nixl
def test_a_tensor_that_is_not_in_the_loan_is_not_sent(pool: Pool) -> None:
    stream, store = pool.greet()
    store.set("joins", b"")
    pair = NixlPair(store, SENDER, CPU, stream, 1 << 12)
    with pytest.raises(StreamLost, match="elsewhere than in the 4096 that are lent"):
        pair.send(pair.buffer(1 << 13))
    pair.close()
    pair.close()
    stream.close()


@needs_nixl
def test_a_read_from_a_sender_that_hangs_is_given_up_and_writes_no_page(
    pool: Pool, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP a sender takes part in what is read from it: reads stop with it, and are ended."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(process_group, "STUCK_SECONDS", 0.4)
    lost: list[str] = []
    monkeypatch.setattr(pool.receiver, "fail", lambda expected, reason: lost.append(reason))
    for attempt in range(8):
        key = f"r{attempt}/0"
        command = {
            "kind": "nixl",
            "description": pool.receiver.describe(),
            "layout": SPEC.layout,
            "shape": list(pool.cache.tensor.shape),
            "seed": 3,
            "transfer_id": key,
            "source_blocks": [0, 1, 2, 3],
            "blocks": pool.expect(key, 0, 1, 2, 3),
            "repeat": 0,
        }
        peer.tell(msgspec.msgpack.encode(command).hex() + "\n")
        assert peer.hear() == "pushing\n"
        wait_until(lambda key=key: pool.receiver.bytes_landed(key))
        time.sleep(0.002 * attempt)
        peer.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
        assert pool.receiver.fence(key, NOBODY)
        pool.cache.tensor.zero_()
        time.sleep(0.6)
        peer.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        assert not pool.cache.tensor.any()
        peer.kill()
        wait_until(lambda: not pool.receiver._streams)
        if any("not done in 0.4 s" in reason for reason in lost):
            break
    else:
        pytest.fail(f"it was never stopped in a read: {lost}")
    monkeypatch.undo()
    pool.transfer("a/0")


@needs_nixl
def test_pairs_leave_no_descriptor_and_no_thread(pool: Pool) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    pool.transfer("warm/0")
    wait_until(lambda: not pool.receiver._streams)
    before = held()
    for number in range(4):
        pool.transfer(f"r{number}/0")
    # Others of this process come and go, but four pairs that left something would have left four.
    wait_until(lambda: all(now - then < 4 for now, then in zip(held(), before, strict=True)), 10)


@needs_nixl
def test_sockets_of_workers_on_loopback_are_on_loopback(pool: Pool) -> None:
    stream, store = pool.greet()
    store.set("joins", b"")
    pair = NixlPair(store, SENDER, CPU, stream, 1 << 12)
    hosts = listening()
    assert hosts and set(hosts) == {"0100007F"}
    pair.close()
    stream.close()


def listening() -> list[str]:
    """Addresses on which this process listens for TCP connections, as the kernel writes them."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_packages", lambda: ["nixl_of_nobody"])
    nixl._library.cache_clear()
    assert not nixl.is_installed()
    with pytest.raises(ConnectorError, match=r"NIXL is not installed: pip install 'tandem-serve\[nixl\]'"):
        Pool()
    with pytest.raises(ConfigError, match="connector nixl: NIXL is not installed"):
        check_connector(WorkerConfig(role="decode", connector="nixl"))
