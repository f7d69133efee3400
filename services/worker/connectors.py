"""Which connectors a worker has: those by which its KV pool can be written, and those by which it writes into pools."""

from collections.abc import Callable

import structlog
import torch
import zmq

from engine.engine import Engine
from kv_transfer.connectors import nixl
from kv_transfer.connectors.base import ConnectorError, PoolDescription, ReceiverConnector, SenderConnector
from kv_transfer.connectors.codec import CODECS
from kv_transfer.connectors.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from kv_transfer.connectors.distributed import DistributedReceiver, DistributedSender
from kv_transfer.connectors.lent_memory import Lent, LentReceiver, LentSender
from kv_transfer.connectors.pinned import PinnedSender
from kv_transfer.connectors.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedSegment
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import ZmqReceiver, ZmqSender
from services.config import ConfigError, KvConfig, WorkerConfig, is_loopback

log = structlog.get_logger()

Secure = Callable[[zmq.Socket[bytes], bool], None]  # a socket, and whether it is the server's

_OF_DEVICE = {"cpu": ("shared_memory", "tcp", "zmq", "gloo", "nixl"), "cuda": ("cuda_ipc", "nccl", "nixl")}


def can_move_kv(config: WorkerConfig) -> bool:
    """Whether peers can have this worker's KV, or bring theirs."""
    return config.role != "aggregated" or config.tensor_parallel == 1


def check_connector(config: WorkerConfig) -> None:
    """Raises ConfigError where nothing, or not this connector, can move what lies on the worker's device."""
    if config.device == "cuda" and config.tensor_parallel > 1 and config.role != "aggregated":
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel}: on CUDA devices KV that is spread over ranks cannot be moved "
            "between workers; run `tandem up --aggregated 1`"
        )
    kinds = _OF_DEVICE[config.device]
    if can_move_kv(config) and config.connector not in ("auto", *kinds):
        raise ConfigError(
            f"connector {config.connector}: with device {config.device} KV moves by {' or '.join(kinds)}; "
            "auto takes the first that works"
        )
    if config.connector == "nixl" and not nixl.is_installed():
        raise ConfigError("connector nixl: NIXL is not installed; docs/configuration.md says what to install")


def can_be_written(config: WorkerConfig) -> bool:
    """Whether peers can write into this worker's cache; else it can only read what they lend."""
    return can_move_kv(config) and not (config.role == "aggregated" and config.device == "cuda")


def codecs_of(config: WorkerConfig | KvConfig) -> tuple[int, ...]:
    """Those by which KV may be packed on its way from and to this worker."""
    return CODECS if config.kv_codec == "auto" else ()


def offered(
    config: WorkerConfig | KvConfig,
    engine: Engine,
    pool: PoolDescription,
    segment: SharedSegment | None,
    stream_key: bytes,
    secure: Secure,
) -> list[ReceiverConnector]:
    """What a worker or the KV service offers its peers, best first. `segment`: shared memory that the pool lies in.

    Aggregated workers on CUDA devices only read what is lent: they can sleep, and then no peer may have mapped their
    memory. Raises ConnectorError if the one that the configuration names does not work here.
    """
    if isinstance(config, WorkerConfig) and not can_move_kv(config):
        return []
    tensor, generation, host = engine.pages.tensor, engine.generation, config.bind
    codecs = codecs_of(config)
    make: dict[str, Callable[[], ReceiverConnector]] = {
        "tcp": lambda: TcpReceiver(tensor, pool, generation, host, stream_key, codecs),
        "zmq": lambda: ZmqReceiver(tensor, pool, generation, host, secure),
        "gloo": lambda: DistributedReceiver(tensor, pool, generation, host, stream_key),
        "cuda_ipc": lambda: CudaIpcReceiver(tensor, pool),
        "nccl": lambda: DistributedReceiver(tensor, pool, generation, host, stream_key),
        "nixl": lambda: nixl.NixlReceiver(tensor, pool, generation, host, stream_key),
    }
    if segment is None:  # else whoever lends could as well write
        make["lent_memory"] = lambda: LentReceiver(engine.pages, pool, generation, host, stream_key)
    if segment is not None:
        make["shared_memory"] = lambda: SharedMemoryReceiver(segment, pool)
    if isinstance(config, WorkerConfig) and not can_be_written(config):
        make = {kind: make[kind] for kind in ("lent_memory",) if config.connector == "auto"}
    if config.connector != "auto":
        return [make[config.connector]()] if config.connector in make else []
    connectors: list[ReceiverConnector] = []
    for kind in filter(make.__contains__, _order(config, tensor.is_cpu, bool(stream_key))):
        try:
            connectors.append(make[kind]())
        except ConnectorError as error:
            log.warning("a connector does not work here", connector=kind, reason=str(error))
    return connectors


def _order(config: WorkerConfig | KvConfig, on_cpu: bool, has_key: bool) -> tuple[str, ...]:
    """Best first. What leaves the machine is encrypted, or at least sealed, unless somebody says otherwise.

    torch.distributed and NIXL trust what they are told, so they are for one machine, and for peers that have the key.
    """
    here = is_loopback(config.bind)
    if_installed = ("nixl",) if nixl.is_installed() else ()
    if not on_cpu:
        return ("cuda_ipc", "lent_memory", *(("nccl", *if_installed) if here and has_key else ()))
    if not here:
        return "shared_memory", "lent_memory", "zmq", "tcp"
    trusting = (*if_installed, "gloo") if has_key else ()
    return "shared_memory", "lent_memory", "tcp", "zmq", *trusting


def open_sender(
    device: torch.device,
    stream_key: bytes,
    secure: Secure,
    codecs: tuple[int, ...],
    lent: Lent | None,
    layout: str,
    kind: str,
    description: bytes,
) -> SenderConnector:
    """A connector to a peer that has sent this description, for a cache on `device`. Raises ConnectorError."""
    if device.type != "cpu" and kind in ("tcp", "zmq"):
        raise ConnectorError(f"{kind} moves no KV of a cache that lies on {device}")
    match kind:
        case "shared_memory":
            on_cpu = device.type == "cpu"
            return SharedMemorySender(description, layout) if on_cpu else PinnedSender(description, layout, device)
        case "lent_memory":
            return LentSender(description, layout, stream_key, lent)
        case "tcp":
            return TcpSender(description, layout, stream_key, codecs)
        case "zmq":
            return ZmqSender(description, layout, secure)
        case "gloo" | "nccl":
            if (device.type == "cpu") != (kind == "gloo"):
                raise ConnectorError(f"{kind} moves no KV of a cache that lies on {device}")
            return DistributedSender(description, layout, stream_key, device)
        case "nixl":
            return nixl.NixlSender(description, layout, stream_key, device)
        case "cuda_ipc":
            return CudaIpcSender(description, layout, device)
    raise ConnectorError(f"the connector {kind!r} is not known here")
