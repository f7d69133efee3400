"""KV between memories of CUDA devices over NCCL and NIXL: bytes arrive, peers that hang or die are shut out.

Needs two devices, for NIXL one; torch, msgspec, xxhash, structlog and pytest.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from optional import needs_nixl

from engine.kv_cache import KVCacheSpec
from kv_transfer.connectors import process_group
from kv_transfer.connectors.base import PoolDescription, SenderIdentity
from kv_transfer.connectors.distributed import DistributedReceiver
from kv_transfer.connectors.nixl import NixlReceiver
from kv_transfer.references import BlockRef

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]

COUNT = torch.cuda.device_count()
KINDS = [
    pytest.param("nccl", marks=pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")),
    pytest.param("nixl", marks=[pytest.mark.skipif(COUNT < 1, reason="needs a CUDA device"), needs_nixl]),
]
PEER = Path(__file__).with_name("nccl_peer.py")
SPEC = KVCacheSpec(num_layers=8, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
D = "d" * 32
NOBODY = SenderIdentity("p" * 32, "", 0, 0)
BLOCKS = 64


class Peer:
    """`nccl_peer.py` on device 1, or where there is one."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(PEER.parents[2]), *filter(None, sys.path)))}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)], stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def tell(self, pool: "Pool", transfer_id: str, refs: list[BlockRef], repeat: int = 1) -> None:
        command = {
            "kind": pool.receiver.capabilities.kind,
            "description": pool.receiver.describe(),
            "layout": SPEC.layout,
            "shape": list(pool.tensor.shape),
            "device": min(1, COUNT - 1),
            "transfer_id": transfer_id,
            "source_blocks": list(range(len(refs))),
            "blocks": refs,
            "repeat": repeat,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command).decode() + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pool:
    """A decode worker's pages on device 0."""

    def __init__(self, kind: str) -> None:
        shape = (BLOCKS, SPEC.num_layers, SPEC.block_size, SPEC.num_kv_heads, 2 * SPEC.head_dim)
        self.tensor = torch.zeros(shape, dtype=SPEC.dtype, device="cuda:0")
        self.generation = [0] * BLOCKS
        description = PoolDescription(D, BLOCKS, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)
        self.receiver = (NixlReceiver if kind == "nixl" else DistributedReceiver)(
            self.tensor, description, self.generation.__getitem__, "127.0.0.1", b"k" * 32
        )

    def expect(self, transfer_id: str, blocks: list[int]) -> list[BlockRef]:
        for block in blocks:
            self.generation[block] += 1
        refs = [BlockRef(D, block, self.generation[block]) for block in blocks]
        self.receiver.expect(transfer_id, refs)
        return refs

    def expected(self, count: int) -> torch.Tensor:
        words = torch.arange(self.tensor.numel() // 4, dtype=torch.int64)
        return words.view(torch.bfloat16).view(self.tensor.shape)[:count]

    def holds(self, blocks: list[int]) -> bool:
        found = self.tensor[blocks].cpu()
        return torch.equal(found.view(torch.int16), self.expected(len(blocks)).view(torch.int16))


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param)
    yield made
    made.receiver.close()


@pytest.fixture
def peers() -> Iterator[Callable[[], Peer]]:
    started: list[Peer] = []

    def start() -> Peer:
        started.append(Peer())
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


def transfer(pool: Pool, peer: Peer, name: str, blocks: list[int]) -> None:
    refs = pool.expect(name, blocks)
    peer.tell(pool, name, refs)
    assert peer.hear() == "pushing\n" and peer.hear() == "pushed 1\n"
    wait_until(lambda: pool.receiver.bytes_landed(name) == len(blocks) * SPEC.block_bytes)
    assert pool.receiver.failure(name) is None
    pool.receiver.finish(name)


def test_bytes_arrive_whole_and_nowhere_else(pool: Pool, peers: Callable[[], Peer]) -> None:
    peer = peers()
    blocks = [40, 3, 17, 5, 63, 0]
    transfer(pool, peer, "a/0", blocks)
    assert pool.holds(blocks)
    rest = [block for block in range(BLOCKS) if block not in blocks]
    assert not pool.tensor[rest].any()
    transfer(pool, peer, "b/0", rest[:32])  # the same pair again
    assert pool.holds(rest[:32])


def test_compute_goes_on_and_stays_right_beside_transfers(pool: Pool, peers: Callable[[], Peer]) -> None:
    peer = peers()
    transfer(pool, peer, "a/0", [1])
    x = torch.randn(1024, 1024, device="cuda:0")
    want = x @ x
    refs = pool.expect("b/0", list(range(32)))
    peer.tell(pool, "b/0", refs, repeat=20)
    for _ in range(200):
        assert torch.equal(x @ x, want)
    assert peer.hear() == "pushing\n" and peer.hear() == "pushed 20\n"
    wait_until(lambda: pool.receiver.bytes_landed("b/0") == 20 * 32 * SPEC.block_bytes)
    assert pool.holds(list(range(32)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_hangs_is_shut_out_and_the_next_has_a_new_pair(
    pool: Pool, peers: Callable[[], Peer], how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a restart of the receiver, whose device goes on computing."""
    monkeypatch.setattr(process_group, "STUCK_SECONDS", 2.0)
    for attempt in range(2):
        peer = peers()
        refs = pool.expect(f"r{attempt}/0", list(range(32)))
        peer.tell(pool, f"r{attempt}/0", refs, repeat=0)
        assert peer.hear() == "pushing\n"
        peer.process.send_signal(how)
        assert pool.receiver.fence(f"r{attempt}/0", NOBODY)
        pool.tensor.zero_()
        torch.cuda.synchronize(0)
        if how is signal.SIGSTOP:
            time.sleep(3)
            peer.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            assert not pool.tensor.any()
            peer.kill()
        wait_until(lambda: not pool.receiver._streams)
        assert not pool.tensor.any()
    transfer(pool, peers(), "s/0", [7, 2])
    assert pool.holds([7, 2])
