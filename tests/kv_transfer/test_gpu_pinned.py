"""Pages of a CUDA device into another process's shared memory, and back. Skipped where there is none."""

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.kv_cache import KVCache, KVCacheSpec
from kv_transfer.checksums import page_sums
from kv_transfer.connectors import pinned as pinned_module
from kv_transfer.connectors.base import ConnectorError, PoolDescription
from kv_transfer.connectors.lent_memory import Lent, LentReceiver, LentSender
from kv_transfer.connectors.pinned import PinnedSender, pinned
from kv_transfer.connectors.shared_memory import SharedMemoryReceiver, SharedSegment
from kv_transfer.process_identity import identify
from kv_transfer.references import BlockRef

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = KVCacheSpec(num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
BLOCKS = 64
CUDA = torch.device("cuda:0")
WRITER = """
import sys, msgspec, torch
from kv_transfer.connectors.pinned import PinnedSender
from kv_transfer.references import BlockRef
description, layout, shape, blocks = msgspec.msgpack.decode(
    bytes.fromhex(sys.stdin.readline()), type=tuple[bytes, str, list[int], list[BlockRef]])
source = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
sender = PinnedSender(description, layout, source.device)
sender.push_layers("t", range(shape[1]), source, list(range(len(blocks))), blocks)
sender.flush("t")
torch.cuda._sleep(6_000_000_000)  # some three seconds
sender.push_layers("t", range(shape[1]), source, list(range(len(blocks))), blocks)
print("pushed", flush=True)
sys.stdin.readline()
"""


def described(incarnation: str) -> PoolDescription:
    return PoolDescription(incarnation, BLOCKS, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)


@pytest.fixture
def host() -> Iterator[SimpleNamespace]:
    """The KV service's side."""
    segment = SharedSegment(BLOCKS * SPEC.block_bytes, BLOCKS, stays=True)
    cache = KVCache(SPEC, BLOCKS, segment.buffer)
    receiver = SharedMemoryReceiver(segment, described("host"))
    yield SimpleNamespace(segment=segment, cache=cache, receiver=receiver)
    receiver.close()


def refs(incarnation: str, *blocks: int) -> list[BlockRef]:
    return [BlockRef(incarnation, block, 7) for block in blocks]


def on_device() -> KVCache:
    cache = KVCache(SPEC, BLOCKS, device="cuda:0")
    generator = torch.Generator(CUDA).manual_seed(1)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, device=CUDA, generator=generator))
    return cache


def until(condition: object, seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.002)


def test_pages_go_to_shared_memory_and_come_back(host: SimpleNamespace) -> None:
    """By pinned memory, part by part; both sides' sums are equal on CPU and device."""
    device = on_device()
    there = refs("host", 9, 0, 63)
    host.receiver.expect("t", there)
    writer = PinnedSender(host.receiver.describe(), SPEC.layout, CUDA)
    pool = pinned(host.segment.describe(described("host")))
    until(pool.pages.is_pinned)
    for layers in (range(0, 1), range(1, 4)):
        writer.push_layers("t", layers, device.tensor, [3, 4, 60], there)
    assert not host.receiver.fence("t", identify("me"))  # another open file of this process holds the lock
    writer.flush("t")
    assert host.receiver.fence("t", identify("me"))
    assert torch.equal(host.cache.tensor[[9, 0, 63]], device.tensor[[3, 4, 60]].cpu())
    assert page_sums(host.cache.tensor, [9, 0, 63]) == page_sums(device.tensor, [3, 4, 60])
    assert not host.cache.tensor[1:9].any()

    back = KVCache(SPEC, BLOCKS, device="cuda:0")
    reader = LentReceiver(back, described("device"), lambda block: 7, "127.0.0.1", b"k" * 32)
    lent = Lent(host.cache.tensor, host.segment.describe(described("host")))
    lender = LentSender(reader.describe(), SPEC.layout, b"k" * 32, lent)
    here = refs("device", 1, 2, 30)
    reader.expect("r", here)
    total = lender.push_layers("r", range(4), host.cache.tensor, [9, 0, 63], here)
    lender.flush("r")
    until(lambda: reader.bytes_landed("r") == total)
    until(lambda: reader.fence("r", identify("me")))
    assert page_sums(back.tensor, [1, 2, 30]) == page_sums(host.cache.tensor, [9, 0, 63])
    assert torch.equal(back.tensor[[1, 2, 30]].cpu(), host.cache.tensor[[9, 0, 63]])
    assert not back.tensor[3:30].any()
    lender.push_layers("r", range(4), host.cache.tensor, [9, 0, 63], here)
    until(lambda: reader.counters.refused.get("unexpected"))  # it was shut out
    for connector in (lender, reader, writer):
        connector.close()
    del pool, writer
    assert not pinned_module._pools


def test_what_may_be_given_back_is_not_written_by_a_device() -> None:
    segment = SharedSegment(BLOCKS * SPEC.block_bytes, BLOCKS)
    receiver = SharedMemoryReceiver(segment, described("host"))
    with pytest.raises(ConnectorError, match="sleeps"):
        PinnedSender(receiver.describe(), SPEC.layout, CUDA)
    receiver.close()


def test_a_writer_that_is_killed_is_shut_out_once_nothing_of_it_is_queued(host: SimpleNamespace) -> None:
    there = refs("host", *range(BLOCKS))
    host.receiver.expect("t", there)
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    command = [host.receiver.describe(), SPEC.layout, list(host.cache.tensor.shape), there]
    process.stdin.write(msgspec.msgpack.encode(command).hex() + "\n")
    process.stdin.flush()
    assert "pushed\n" in process.stdout  # behind what is logged
    sender = identify("theirs", process.pid)
    assert not host.receiver.fence("t", sender)  # its copies have still to run
    killed = time.monotonic()
    process.kill()
    until(lambda: host.receiver.fence("t", sender), 60)
    host.cache.tensor.zero_()  # the blocks have another owner now
    while time.monotonic() - killed < 5:
        assert not host.cache.tensor.any()
        time.sleep(0.1)
    process.wait()
