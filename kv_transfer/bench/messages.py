"""What the two processes of `tandem kv bench` say to each other: a command a line, in JSON, and an answer to each."""

import msgspec
import numpy as np
import torch

from engine.kv_cache import KVCacheSpec
from kv_transfer.connectors.cuda_memory import MemoryHandle
from kv_transfer.references import BlockRef

# Blocks of a model of 8 billion parameters: 64 KiB a layer, 2 MiB a block.
SPEC = KVCacheSpec(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


class Open(msgspec.Struct, tag=True):
    """Opens a connector to the pool of `description` and fills a cache of `shape` on `device` with `pattern`."""

    way: str  # of those in `connectors`
    description: bytes
    shape: list[int]
    device: str  # cpu, or as cuda:1
    key: bytes  # of TCP streams, and of those that headers for gloo and NCCL take
    curve: list[bytes]  # public and secret key of ZMQ sockets; empty: not encrypted


class Push(msgspec.Struct, tag=True):
    """Pushes so many layers of these blocks, then takes the sums of the source's pages if asked to."""

    transfer_id: str
    num_layers: int
    source_blocks: list[int]
    blocks: list[BlockRef]
    sums: bool


class OpenMemory(msgspec.Struct, tag=True):
    """The raw link is a copy into a file of the other side's, mapped."""

    path: str
    size: int


class OpenDevice(msgspec.Struct, tag=True):
    """The raw link is a copy from `device` into memory of the other side's on a CUDA device, mapped."""

    memory: MemoryHandle
    size: int
    device: str


class OpenSocket(msgspec.Struct, tag=True):
    """The raw link is a socket to a port of this host."""

    port: int


class SendRaw(msgspec.Struct, tag=True):
    """Moves so many bytes over the raw link."""

    num_bytes: int


class Close(msgspec.Struct, tag=True):
    """Closes connector and raw link and frees their memory."""


Command = Open | Push | OpenMemory | OpenDevice | OpenSocket | SendRaw | Close


class Answer(msgspec.Struct):
    """When the command began, and ended but for sums, by the monotonic clock that processes of a host share."""

    started: float
    ended: float
    sums: list[int] = []
    error: str = ""  # why it failed


def pattern(shape: list[int], device: str) -> torch.Tensor:
    """A bfloat16 cache in which no two places of eight bytes are equal."""
    words = torch.arange(int(np.prod(shape)) // 4, dtype=torch.int64, device=device)
    return words.view(torch.bfloat16).view(shape)
