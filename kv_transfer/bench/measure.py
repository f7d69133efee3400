"""Measures connectors between this process, which receives, and a child, which sends.

Each connector is measured in rounds that alternate with rounds of the raw link under it, so that whatever else the
machine does slows both: a copy by one process into memory of the other, or a socket over loopback from and into memory
that is used again.
"""

import os
import platform
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import torch
import zmq

from engine.kv_cache import KVCache, KVCacheSpec
from kv_transfer.bench.sender import (
    Answer,
    Command,
    CopyMemory,
    Open,
    OpenMemory,
    OpenSocket,
    Push,
    SendSocket,
    pattern,
    secure,
)
from kv_transfer.connectors.base import ConnectorError, PoolDescription, ReceiverConnector
from kv_transfer.connectors.distributed import DistributedReceiver
from kv_transfer.connectors.shared_memory import SharedMemoryReceiver, SharedSegment
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.zmq_stream import ZmqReceiver
from kv_transfer.references import BlockRef

# Blocks of a model of 8 billion parameters: 64 KiB a layer, 2 MiB a block.
SPEC = KVCacheSpec(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
WAYS = ("shared_memory", "tcp", "zmq", "zmq plain", "gloo")
_ROUNDS = 11
_SMALL_ROUNDS = 101
_INCARNATION = "b" * 32
_POLL_SECONDS = 2e-5
_STUCK_SECONDS = 30.0


class Result(msgspec.Struct):
    """One connector. Seconds from the first push to the last byte in its page; medians of all rounds."""

    connector: str
    layout: str  # contiguous or scattered
    bytes: int
    gb_per_s: float
    latency_us: float  # of one layer of one block
    limit: str  # what the raw link is
    limit_gb_per_s: float
    limit_latency_us: float
    fraction_of_limit: float  # of the throughput
    rounds: int


class Report(msgspec.Struct):
    """All results of one run, and where it ran."""

    command: str
    started_at: str
    cpus: int
    load_average: float  # of the minute before
    kernel: str
    python: str
    torch: str
    block_bytes: int
    layer_bytes: int
    results: list[Result]


class Child:
    """The sending process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kv_transfer.bench.sender"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def tell(self, command: Command) -> None:
        """Gives a command; `hear` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def hear(self) -> Answer:
        """The answer to the oldest command. Raises ConnectorError if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConnectorError("the sending process of the benchmark has died; its last words are above")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise ConnectorError(answer.error)
        return answer

    def ask(self, command: Command) -> Answer:
        """Gives a command and waits for its end."""
        self.tell(command)
        return self.hear()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


class RawMemory:
    """A copy from private memory of the child's into memory that both map."""

    name = "memory copy"

    def __init__(self, child: Child, num_bytes: int) -> None:
        self._child = child
        self._num_bytes = num_bytes
        self._segment = SharedSegment(num_bytes, 1)
        child.ask(OpenMemory(f"/dev/shm/{self._segment.name}", num_bytes))

    def seconds(self, *, small: bool) -> float:
        """Of one round."""
        answer = self._child.ask(CopyMemory(SPEC.layer_bytes if small else self._num_bytes))
        return answer.ended - answer.started

    def close(self) -> None:
        """Frees the memory."""
        self._segment.unlink()


class RawSocket:
    """A socket over loopback, read into one buffer."""

    name = "socket"

    def __init__(self, child: Child, num_bytes: int) -> None:
        self._child = child
        self._num_bytes = num_bytes
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            child.tell(OpenSocket(listener.getsockname()[1]))
            self._socket = listener.accept()[0]
            child.hear()
        self._socket.settimeout(_STUCK_SECONDS)
        self._buffer = memoryview(bytearray(num_bytes))

    def seconds(self, *, small: bool) -> float:
        """Of one round."""
        view = self._buffer[: SPEC.layer_bytes if small else self._num_bytes]
        self._child.tell(SendSocket(len(view)))
        while view:
            if not (received := self._socket.recv_into(view)):
                raise ConnectorError("the raw socket was closed")
            view = view[received:]
        ended = time.monotonic()
        return ended - self._child.hear().started

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


class Transfers:
    """Transfers of `num_blocks` blocks through one connector, into a pool of twice as many."""

    def __init__(self, child: Child, way: str, num_blocks: int, layout: str) -> None:
        self._child = child
        self._generation = [0] * (2 * num_blocks)
        self._turn = 0
        self._key = secrets.token_bytes(32)
        curve = [] if way == "zmq plain" else list(zmq.curve_keypair())
        self._cache, self._receiver = self._open(way, curve)
        draw = random.Random(0)
        blocks = range(2 * num_blocks)
        self._source = list(blocks[:num_blocks]) if layout == "contiguous" else draw.sample(blocks, num_blocks)
        self._destination = list(blocks[-num_blocks:]) if layout == "contiguous" else draw.sample(blocks, num_blocks)
        shape = list(self._cache.tensor.shape)
        kind = self._receiver.capabilities.kind
        child.ask(Open(kind, self._receiver.describe(), SPEC.layout, shape, self._key, curve))
        self.seconds(small=False)  # takes all pages once
        if not torch.equal(
            self._cache.tensor[self._destination].view(torch.int16),
            pattern(shape)[self._source].view(torch.int16),
        ):
            raise ConnectorError(f"{way}: the bytes that arrived are not those that were sent")

    def seconds(self, *, small: bool) -> float:
        """Of one transfer: all layers of all blocks, or the first layer of one block."""
        count, layers = (1, 1) if small else (len(self._source), SPEC.num_layers)
        self._turn += 1
        key = f"bench{self._turn}/0"
        refs = []
        for block in self._destination[:count]:
            self._generation[block] += 1
            refs.append(BlockRef(_INCARNATION, block, self._generation[block]))
        receiver = self._receiver
        receiver.expect(key, refs)
        self._child.tell(Push(key, layers, self._source[:count], refs))
        if not receiver.capabilities.one_sided:
            self._wait(key, count * layers * SPEC.layer_bytes)
        ended = time.monotonic()
        answer = self._child.hear()
        receiver.finish(key)
        return (answer.ended if receiver.capabilities.one_sided else ended) - answer.started

    def close(self) -> None:
        """Frees pool and connector."""
        self._receiver.close()

    def _wait(self, key: str, num_bytes: int) -> None:
        patience_ends = time.monotonic() + _STUCK_SECONDS
        while self._receiver.bytes_landed(key) != num_bytes:
            if failure := self._receiver.failure(key):
                raise ConnectorError(failure)
            if time.monotonic() > patience_ends:
                raise ConnectorError(f"the bytes have not arrived in {_STUCK_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _open(self, way: str, curve: list[bytes]) -> tuple[KVCache, ReceiverConnector]:
        num_blocks = len(self._generation)
        pool = PoolDescription(_INCARNATION, num_blocks, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)
        if way == "shared_memory":
            segment = SharedSegment(num_blocks * SPEC.block_bytes, num_blocks)
            return KVCache(SPEC, num_blocks, segment.buffer), SharedMemoryReceiver(segment, pool)
        cache = KVCache(SPEC, num_blocks)
        generation = self._generation.__getitem__
        if way == "gloo":
            return cache, DistributedReceiver(cache.tensor, pool, generation, "127.0.0.1", self._key)
        if way == "tcp":
            return cache, TcpReceiver(cache.tensor, pool, generation, "127.0.0.1", self._key)
        return cache, ZmqReceiver(cache.tensor, pool, generation, "127.0.0.1", secure(curve))


def run(
    connectors: list[str], num_bytes: int, layouts: list[str], command: str, on_result: Callable[[Result], None]
) -> Report:
    """Measures each of WAYS whose kind is in `connectors`. Raises ConnectorError."""
    report = Report(
        command=command,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpus=len(os.sched_getaffinity(0)),
        load_average=round(os.getloadavg()[0], 2),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        block_bytes=SPEC.block_bytes,
        layer_bytes=SPEC.layer_bytes,
        results=[],
    )
    num_blocks = max(1, num_bytes // SPEC.block_bytes)
    child = Child()
    try:
        for layout in layouts:
            for way in WAYS:
                if way.split()[0] in connectors:
                    result = _measure(child, way, num_blocks, layout)
                    report.results.append(result)
                    on_result(result)
    finally:
        child.close()
    return report


def _measure(child: Child, way: str, num_blocks: int, layout: str) -> Result:
    num_bytes = num_blocks * SPEC.block_bytes
    opened: list[RawMemory | RawSocket | Transfers] = []
    try:
        if way == "shared_memory":
            opened.append(RawMemory(child, num_bytes))
        else:
            opened.append(RawSocket(child, num_bytes))
        transfers = Transfers(child, way, num_blocks, layout)
        opened.append(transfers)
        link = opened[0]
        assert not isinstance(link, Transfers)
        large, limit_large = _alternate(transfers, link, _ROUNDS, small=False)
        small, limit_small = _alternate(transfers, link, _SMALL_ROUNDS, small=True)
    finally:
        for part in opened:
            part.close()
    return Result(
        connector=way,
        layout=layout,
        bytes=num_bytes,
        gb_per_s=num_bytes / large / 1e9,
        latency_us=small * 1e6,
        limit=link.name,
        limit_gb_per_s=num_bytes / limit_large / 1e9,
        limit_latency_us=limit_small * 1e6,
        fraction_of_limit=limit_large / large,
        rounds=_ROUNDS,
    )


def _alternate(transfers: Transfers, link: RawMemory | RawSocket, rounds: int, *, small: bool) -> tuple[float, float]:
    """Median seconds of both."""
    link.seconds(small=small)  # takes pages, opens windows
    pairs = [(transfers.seconds(small=small), link.seconds(small=small)) for _ in range(rounds)]
    return statistics.median(own for own, _ in pairs), statistics.median(raw for _, raw in pairs)
