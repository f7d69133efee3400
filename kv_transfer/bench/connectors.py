"""The connectors that `tandem kv bench` measures: how each is opened on either side, and what raw link lies under it.

A connector is added here, and to the names that the command takes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import zmq

from engine.kv_cache import KVCache
from kv_transfer.bench.links import Link, RawDevice, RawMemory, RawSocket
from kv_transfer.bench.messages import SPEC, Open
from kv_transfer.connectors import nixl
from kv_transfer.connectors.base import PoolDescription, ReceiverConnector, SenderConnector
from kv_transfer.connectors.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from kv_transfer.connectors.distributed import DistributedReceiver, DistributedSender
from kv_transfer.connectors.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedSegment
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import Secure, ZmqReceiver, ZmqSender

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Destination:
    """The receiver's pool on `device`, before there is memory for it."""

    pool: PoolDescription
    generation: Callable[[int], int]
    device: str
    key: bytes
    curve: list[bytes]

    def cache(self) -> KVCache:
        """Memory that nobody shares."""
        return KVCache(SPEC, self.pool.num_blocks, device=self.device)


Receiver = tuple[KVCache, ReceiverConnector]


@dataclass(frozen=True)
class Way:
    """One row of the results."""

    connector: str  # as the command names it
    receive: Callable[[Destination], Receiver]
    send: Callable[[Open], SenderConnector]
    link: type[Link]
    num_devices: int = 0  # CUDA devices that it needs; 0: it moves what lies in memory of the CPU
    curve: bool = False  # whether its sockets encrypt


def _shared_memory(to: Destination) -> Receiver:
    segment = SharedSegment(to.pool.num_blocks * to.pool.block_bytes, to.pool.num_blocks)
    return KVCache(SPEC, to.pool.num_blocks, segment.buffer), SharedMemoryReceiver(segment, to.pool)


def _tcp(to: Destination) -> Receiver:
    cache = to.cache()
    return cache, TcpReceiver(cache.tensor, to.pool, to.generation, _HOST, to.key)


def _zmq(to: Destination) -> Receiver:
    cache = to.cache()
    return cache, ZmqReceiver(cache.tensor, to.pool, to.generation, _HOST, _secure(to.curve))


def _send_zmq(to: Open) -> SenderConnector:
    return ZmqSender(to.description, SPEC.layout, _secure(to.curve))


def _distributed(to: Destination) -> Receiver:
    cache = to.cache()
    return cache, DistributedReceiver(cache.tensor, to.pool, to.generation, _HOST, to.key)


def _send_distributed(to: Open) -> SenderConnector:
    return DistributedSender(to.description, SPEC.layout, to.key, torch.device(to.device))


def _nixl(to: Destination) -> Receiver:
    cache = to.cache()
    return cache, nixl.NixlReceiver(cache.tensor, to.pool, to.generation, _HOST, to.key)


def _send_nixl(to: Open) -> SenderConnector:
    return nixl.NixlSender(to.description, SPEC.layout, to.key, torch.device(to.device))


def _cuda_ipc(to: Destination) -> Receiver:
    cache = to.cache()
    return cache, CudaIpcReceiver(cache.tensor, to.pool)


WAYS = {
    "shared_memory": Way(
        "shared_memory", _shared_memory, lambda to: SharedMemorySender(to.description, SPEC.layout), RawMemory
    ),
    "tcp": Way("tcp", _tcp, lambda to: TcpSender(to.description, SPEC.layout, to.key), RawSocket),
    "zmq": Way("zmq", _zmq, _send_zmq, RawSocket, curve=True),
    "zmq plain": Way("zmq", _zmq, _send_zmq, RawSocket),
    "gloo": Way("gloo", _distributed, _send_distributed, RawSocket),
    "cuda_ipc": Way(
        "cuda_ipc",
        _cuda_ipc,
        lambda to: CudaIpcSender(to.description, SPEC.layout, torch.device(to.device)),
        RawDevice,
        num_devices=1,
    ),
    "nccl": Way("nccl", _distributed, _send_distributed, RawDevice, num_devices=2),
    "nixl": Way("nixl", _nixl, _send_nixl, RawMemory),
    "nixl cuda": Way("nixl", _nixl, _send_nixl, RawDevice, num_devices=1),
}


def devices() -> tuple[str, str] | None:
    """CUDA devices of sender and receiver, which are the same where there is one; None: there is none."""
    count = torch.cuda.device_count()
    return (f"cuda:{min(1, count - 1)}", "cuda:0") if count else None


def peer_access() -> bool | None:
    """Whether the two devices can access each other's memory; None where there are no two."""
    if torch.cuda.device_count() < 2:
        return None
    return torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)


def why_not(way: Way) -> str:
    """Why this machine cannot measure it; empty: it can."""
    if way.connector == "nixl" and not nixl.is_installed():
        return "NIXL is not installed"
    if (found := torch.cuda.device_count()) < way.num_devices:
        needed = "a CUDA device" if way.num_devices == 1 else f"{way.num_devices} CUDA devices"
        return f"needs {needed}, torch sees {found}"
    if way.num_devices and peer_access() is False:
        return "the CUDA devices cannot access each other's memory, so there is no raw link to compare with"
    return ""


def _secure(curve: list[bytes]) -> Secure:
    """CURVE with this key pair on both sides, or nothing."""

    def set_keys(socket: zmq.Socket[bytes], server: bool) -> None:
        if not curve:
            return
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve[1])
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, curve[0])

    return set_keys
