"""What a connector is: a way to get KV bytes from the pages of one worker into the pages of another."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import torch

from kv_transfer.references import BlockRef

_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]


class ConnectorError(Exception):
    """The bytes cannot be moved this way; says why and what to do."""


class PushRefused(ConnectorError):
    """The receiver does not take the bytes of this transfer, whatever brings them."""


@dataclass(frozen=True)
class Capabilities:
    """What a kind of connector can do."""

    kind: str
    cross_host: bool
    one_sided: bool  # the sender writes into the receiver's memory by itself


@dataclass
class ConnectorCounters:
    """What one side of a connector has moved and what it has refused, for metrics."""

    bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by kind: generation, range, checksum, malformed, ...
    on_refuse: Callable[[str], None] | None = None  # told each kind as it comes, on any thread
    on_unpack: Callable[[int, int], None] | None = None  # told bytes of each payload that came packed: before and after

    def count(self, num_bytes: int, packed: int | None = None) -> None:
        """Counts bytes of KV that were moved, `packed` ones on the way; None: as they are."""
        self.bytes += num_bytes
        if packed is not None and self.on_unpack is not None:
            self.on_unpack(packed, num_bytes)

    def refuse(self, kind: str) -> None:
        """Counts one message or push that was not written."""
        self.refused[kind] = self.refused.get(kind, 0) + 1
        if self.on_refuse is not None:
            self.on_refuse(kind)


class PoolDescription(msgspec.Struct, frozen=True):
    """The receiver's pool, as a sender must know it before it writes. Part of each connector's description."""

    incarnation: str
    num_blocks: _Positive
    block_bytes: _Positive
    layer_bytes: _Positive
    layout: str

    def __post_init__(self) -> None:
        if self.block_bytes % self.layer_bytes:
            raise ValueError(f"a block of {self.block_bytes} bytes is not whole layers of {self.layer_bytes}")

    @property
    def num_layers(self) -> int:
        """Layers in one block."""
        return self.block_bytes // self.layer_bytes

    def require_layout(self, layout: str) -> None:
        """Raises ConnectorError unless the pool's blocks have the layout that the sender pushes."""
        if self.layout != layout:
            raise ConnectorError(f"the receiver's block layout is {self.layout}, and {layout} would be pushed")

    def check_push(
        self, layers: range, source: torch.Tensor, source_blocks: Sequence[int], blocks: Sequence[BlockRef]
    ) -> None:
        """Raises ConnectorError unless these rows of `source` exist and fit their destination."""
        num_blocks, num_layers = source.shape[:2]
        if (
            num_layers != self.num_layers
            or source[0, 0].nbytes != self.layer_bytes
            or not 0 <= layers.start < layers.stop <= num_layers
            or len(blocks) != len(source_blocks)
            or not all(0 <= block < num_blocks for block in source_blocks)
        ):
            raise PushRefused(
                f"{layers} of the layers of blocks {list(source_blocks)} of a cache {list(source.shape)} does not fit "
                f"{len(blocks)} blocks of {self.num_layers} layers of {self.layer_bytes} bytes"
            )


class SenderIdentity(msgspec.Struct, frozen=True):
    """The process that writes."""

    incarnation: str
    boot_id: str
    pid: int
    start_ticks: int  # /proc/PID/stat field 22: a reused pid has another


class ReceiverConnector(ABC):
    """The side that owns the destination pool."""

    capabilities: Capabilities
    counters: ConnectorCounters

    @abstractmethod
    def describe(self) -> bytes:
        """msgpack that a sender's constructor understands."""

    @abstractmethod
    def expect(self, transfer_id: str, blocks: Sequence[BlockRef]) -> None:
        """From now on this transfer may write these blocks."""

    @abstractmethod
    def bytes_landed(self, transfer_id: str) -> int | None:
        """Bytes received for the transfer; None where the receiver cannot count (one-sided)."""

    @abstractmethod
    def failure(self, transfer_id: str) -> str | None:
        """Why bytes of this expected transfer were refused, so that it cannot succeed any more; None if none were."""

    @abstractmethod
    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Shuts the transfer out. True when no write can follow; False while one may still be under way: ask again.

        `sender` is the peer, for connectors that can only shut out all of a peer.
        """

    @abstractmethod
    def finish(self, transfer_id: str) -> None:
        """The writer has stopped. To be called before the blocks are handed to anybody else."""

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and memory. Idempotent."""


class SenderConnector(ABC):
    """The side that computes the KV; one per receiver."""

    counters: ConnectorCounters

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

        `source` is the sender's cache tensor [num_blocks, L, page, heads, 2 * dim]. The connector may read it until
        `flush` or `stop` returns; a block that changes until then must be pushed again. Raises ConnectorError.
        """

    def push_layers(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """`push` of several layers that are there at the same time, for connectors to which that is one thing."""
        return sum(self.push(transfer_id, layer, source, source_blocks, blocks) for layer in layers)

    @abstractmethod
    def flush(self, transfer_id: str) -> None:
        """Returns when all pushed bytes are out and the source blocks are not read any more. Ends the pushes.

        May block. Raises ConnectorError when the receiver takes nothing.
        """

    def condition(self) -> str:
        """For people: what the connector finds of its link, if it looks."""
        return ""

    @abstractmethod
    def stop(self, transfer_id: str) -> None:
        """Drops what was pushed and is not out yet; returns when the source blocks are not read any more.

        Ends the pushes. Never raises, never blocks for long.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and mappings. Idempotent."""
