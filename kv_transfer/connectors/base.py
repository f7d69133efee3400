"""What a connector is: a way to get KV bytes from the pages of one worker into the pages of another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from kv_transfer.references import BlockRef


class ConnectorError(Exception):
    """The bytes cannot be moved this way; says why and what to do."""


@dataclass(frozen=True)
class Capabilities:
    """What a kind of connector can do."""

    kind: str
    cross_host: bool
    one_sided: bool  # the sender writes into the receiver's memory by itself


class PoolDescription(msgspec.Struct, frozen=True):
    """The receiver's pool, as a sender must know it before it writes. Part of each connector's description."""

    incarnation: str
    num_blocks: int
    block_bytes: int
    layer_bytes: int
    layout: str


class ReceiverConnector(ABC):
    """The side that owns the destination pool."""

    capabilities: Capabilities

    @abstractmethod
    def describe(self) -> bytes:
        """msgpack that a sender's `connect` understands."""

    @abstractmethod
    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """From now on this transfer may write these blocks."""

    @abstractmethod
    def bytes_landed(self, transfer_id: str) -> int | None:
        """Bytes received for the transfer; None where the receiver cannot count (one-sided)."""

    @abstractmethod
    def fence(self, transfer_id: str, sender: "SenderIdentity") -> bool:
        """Shuts the transfer out. True when no write can follow; False while the sender may still write."""

    @abstractmethod
    def finish(self, transfer_id: str) -> None:
        """The transfer is over in peace."""

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and memory."""


class SenderConnector(ABC):
    """The side that computes the KV; one per receiver."""

    @abstractmethod
    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Writes one layer of `source_blocks` into `blocks`; returns the bytes. Called on the engine thread: quick.

        `source` is the sender's cache tensor [num_blocks, L, page, heads, 2 * dim]. Raises ConnectorError.
        """

    @abstractmethod
    def flush(self, transfer_id: str) -> None:
        """Returns when all pushed bytes are on their way and the source blocks are not read any more. May block."""

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and mappings."""


class SenderIdentity(msgspec.Struct, frozen=True):
    """Enough to know whether the sending process is still alive, seen from the same host."""

    incarnation: str
    boot_id: str
    pid: int
    start_ticks: int  # /proc/PID/stat field 22: a reused pid has another
