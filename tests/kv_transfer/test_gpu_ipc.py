"""Pages of a CUDA device that another process writes. Skipped where there is none."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import PoolDescription
from kv_transfer.connectors.cuda_ipc import CudaIpcReceiver
from kv_transfer.process_identity import identify
from kv_transfer.references import BlockRef

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")]

SHAPE = (40, 3, 16, 2, 64)  # of both caches
SENDER = """
import sys, threading, time, msgspec, torch
from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.cuda_ipc import CudaIpcSender
from kv_transfer.references import BlockRef

device = torch.device("cuda", int(sys.argv[1]))
torch.cuda.set_device(device)
for line in sys.stdin:
    description, shape, dtype, source_blocks, blocks, flush, delay = msgspec.msgpack.decode(
        bytes.fromhex(line), type=tuple[bytes, list[int], str, list[int], list[BlockRef], int, int])
    source = torch.arange(1000 * shape[0], device=device).repeat_interleave(
        torch.Size(shape).numel() // shape[0] // 1000 + 1)[: torch.Size(shape).numel()]
    source = (source % 251 + 1).view(shape).to(getattr(torch, dtype))
    try:
        sender = CudaIpcSender(description, "L", device)
        if delay:
            sender.push("t", 0, source, source_blocks, blocks)  # what waits for the device happens now
            torch.cuda.synchronize()
            torch.cuda._sleep(delay)
        sender.push("t", 0, source, source_blocks, blocks)
        sender.push_layers("t", range(1, shape[1]), source, source_blocks, blocks)
        print("pushed", sender.counters.bytes, flush=True)
        threads = [threading.Thread(target=sender.flush, args=("t",)) for _ in range(flush)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        if flush:
            print("flushed", flush=True)
    except ConnectorError as error:
        print("refused", error, flush=True)
"""


class Receiving:
    """A pool on the first device and a sender's process on another, or on the same one."""

    def __init__(self, device: int, dtype: torch.dtype) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self.pages = torch.zeros(SHAPE, dtype=dtype, device="cuda:0")
        block_bytes = self.pages[0].nbytes
        self.pool = PoolDescription("mine", SHAPE[0], block_bytes, block_bytes // SHAPE[1], "L")
        self.receiver = CudaIpcReceiver(self.pages, self.pool)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        self.identity = identify("theirs", self.process.pid)

    def push(self, source_blocks: list[int], blocks: list[BlockRef], *, flush: int = 1, delay: int = 0) -> str:
        """`flush`: by so many threads; `delay` in clocks of the device, before what is pushed is there."""
        request = [self.receiver.describe(), list(SHAPE), self.dtype, source_blocks, blocks, flush, delay]
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(request).hex() + "\n")
        self.process.stdin.flush()
        said = self.hear()
        if flush and delay == 0 and said.startswith("pushed"):
            assert self.hear() == "flushed\n"
        return said

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.receiver.close()


@pytest.fixture
def receiving() -> Any:
    """Makes receivers and ends them."""
    made: list[Receiving] = []

    def make(device: int = 0, dtype: torch.dtype = torch.bfloat16) -> Receiving:
        made.append(Receiving(device, dtype))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., Receiving]
LONG = 6_000_000_000  # clocks: some three seconds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", [0, 1])
def test_pages_land_where_they_are_meant(receiving: Make, device: int, dtype: torch.dtype) -> None:
    if device >= DEVICES:
        pytest.skip(f"needs {device + 1} CUDA devices, there are {DEVICES}")
    pair = receiving(device, dtype)
    refs = [BlockRef("mine", block, 7, b"") for block in (5, 0, 39, 12)]
    pair.receiver.expect("t", refs)
    assert pair.push([3, 4, 30, 2], refs).split() == ["pushed", str(4 * pair.pool.block_bytes)]
    assert pair.receiver.fence("t", pair.identity)
    numel = torch.Size(SHAPE).numel()
    source = torch.arange(1000 * SHAPE[0]).repeat_interleave(numel // SHAPE[0] // 1000 + 1)[:numel]
    source = (source % 251 + 1).view(SHAPE).to(dtype)
    want = torch.zeros(SHAPE, dtype=dtype)
    want[[5, 0, 39, 12]] = source[[3, 4, 30, 2]]
    assert torch.equal(pair.pages.cpu(), want)
    assert page_sums(pair.pages, [5, 0]) == page_sums(source.cuda(), [3, 4])
    assert page_sums(pair.pages, [5]) != page_sums(source.cuda(), [4])


def test_what_is_not_expected_is_refused(receiving: Make) -> None:
    pair = receiving()
    ref = BlockRef("mine", 5, 7, b"")
    assert pair.push([0], [ref]).startswith("refused")
    pair.receiver.expect("t", [ref])
    assert pair.push([0], [BlockRef("mine", 5, 6, b"")]).startswith("refused")
    assert pair.push([0], [ref]).startswith("pushed")
    pair.receiver.finish("t")
    assert pair.push([0], [ref]).startswith("refused")


@pytest.mark.parametrize("device", [0, 1])
def test_a_writer_that_is_killed_is_shut_out_once_nothing_of_it_is_queued(receiving: Make, device: int) -> None:
    """Again and again from the moment it is killed: what it has queued must not land after the fence says so."""
    if device >= DEVICES:
        pytest.skip(f"needs {device + 1} CUDA devices, there are {DEVICES}")
    pair = receiving(device)
    refs = [BlockRef("mine", block, 7, b"") for block in range(SHAPE[0])]
    pair.receiver.expect("t", refs)
    assert pair.push(list(range(SHAPE[0])), refs, flush=0, delay=LONG).startswith("pushed")
    assert not pair.receiver.fence("t", pair.identity)  # its copies have still to run
    killed = time.monotonic()
    pair.process.kill()
    while not pair.receiver.fence("t", pair.identity):
        assert time.monotonic() - killed < 60
    pair.pages.zero_()  # the blocks have another owner now
    torch.cuda.synchronize()
    while time.monotonic() - killed < 6:
        assert not pair.pages.any()
        time.sleep(0.1)


def test_two_who_flush_one_transfer_both_wait_for_its_last_copy(receiving: Make) -> None:
    pair = receiving()
    ref = BlockRef("mine", 5, 7, b"")
    pair.receiver.expect("t", [ref])
    assert pair.push([0], [ref], flush=2, delay=LONG).startswith("pushed")
    time.sleep(0.5)  # both wait
    assert not pair.receiver.fence("t", pair.identity)
    assert pair.hear() == "flushed\n"
    assert pair.receiver.fence("t", pair.identity)
    assert pair.pages[5].all()


def test_memory_beyond_the_peers_is_not_mapped(receiving: Make) -> None:
    pair = receiving()
    memory = pair.receiver._memory
    assert 0 <= memory.offset <= memory.size - pair.pages.nbytes
    code = """
import sys, msgspec, torch
from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.cuda_memory import MappedMemory, MemoryHandle
memory = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=MemoryHandle)
mapped = MappedMemory(memory, memory.size - memory.offset, torch.device("cuda:0"))
mapped.close()
for offset in (memory.size, 1 << 62):
    try:
        MappedMemory(msgspec.structs.replace(memory, offset=offset), 1 << 30, torch.device("cuda:0"))
    except ConnectorError as error:
        assert "are more than" in str(error), error
    else:
        raise AssertionError(offset)
"""
    subprocess.run([sys.executable, "-c", code, msgspec.msgpack.encode(memory).hex()], check=True, timeout=120)


def test_one_word_that_differs_is_seen() -> None:
    pages = torch.zeros(3, 2, 16, 2, 64, dtype=torch.float16, device="cuda")
    before = page_sums(pages, [0, 1, 2])
    pages[1, 1, 15, 1, 63] = 1.0
    after = page_sums(pages, [0, 1, 2])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(("shape", "word"), [((5, 3, 2, 2, 64), 8), ((4, 1, 3, 1, 15), 1), ((2, 1, 1, 1, 1 << 16), 8)])
def test_sums_are_those_of_the_words(shape: tuple[int, ...], word: int) -> None:
    pages = torch.randint(-100, 100, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    rows = [shape[0] - 1, 0, 1]
    expected = []
    for row in rows:
        values = pages[row].numpy().view(np.uint8).reshape(-1)
        words = values.view(np.uint64) if word == 8 else values.astype(np.uint64)
        factors = np.arange(1, 2 * len(words), 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        expected.append(int((words * factors).sum()))
    assert page_sums(pages.cuda(), rows) == expected
    assert page_sums(pages.cuda(), []) == []
