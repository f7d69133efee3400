"""A sender in a process of its own: one command a line on stdin, msgpack in hex; says on stdout what became of it."""

import sys

import msgspec
import torch

from kv_transfer.connectors.base import ConnectorError, PoolDescription, SenderConnector
from kv_transfer.connectors.distributed import DistributedSender
from kv_transfer.connectors.lent_memory import Lent, LentSender
from kv_transfer.connectors.nixl import NixlSender
from kv_transfer.connectors.shared_memory import SharedMemorySender, SharedSegment
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import ZmqSender
from kv_transfer.references import BlockRef


class Command(msgspec.Struct):
    kind: str  # of connector
    description: bytes
    layout: str
    shape: list[int]  # of the source cache, float32, filled from `seed`
    seed: int
    transfer_id: str
    source_blocks: list[int]
    blocks: list[BlockRef]
    repeat: int = 1  # of all layers; 0: until killed


def cache(shape: list[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lent(source: torch.Tensor, layout: str, segments: list[SharedSegment]) -> Lent:
    """The same cache, in memory that is shared until this process ends."""
    segments.append(SharedSegment(source.nbytes, len(source)))
    pages = torch.frombuffer(segments[-1].buffer, dtype=source.dtype).view(source.shape)
    pages.copy_(source)
    pool = PoolDescription("sender", len(source), source[0].nbytes, source[0, 0].nbytes, layout)
    return Lent(pages, segments[-1].describe(pool))


def main() -> None:
    torch.set_num_threads(1)
    segments: list[SharedSegment] = []
    for line in sys.stdin:
        if line == "own\n":
            segments.append(SharedSegment(4096, 1))
            print(segments[-1].name, flush=True)
            continue
        command = msgspec.msgpack.decode(bytes.fromhex(line.strip()), type=Command)
        source = cache(command.shape, command.seed)
        connector: SenderConnector
        if command.kind == "shared_memory":
            connector = SharedMemorySender(command.description, command.layout)
        elif command.kind == "lent_memory":
            of = lent(source, command.layout, segments)
            source, connector = of.pages, LentSender(command.description, command.layout, b"", of)
        elif command.kind == "gloo":
            connector = DistributedSender(command.description, command.layout, b"k" * 32, torch.device("cpu"))
        elif command.kind == "nixl":
            connector = NixlSender(command.description, command.layout, b"k" * 32, torch.device("cpu"))
        elif command.kind == "tcp":
            connector = TcpSender(command.description, command.layout, b"")
        else:
            connector = ZmqSender(command.description, command.layout, lambda socket, server: None)
        print("pushing", flush=True)
        rounds = 0
        try:
            while command.repeat == 0 or rounds < command.repeat:
                for layer in range(command.shape[1]):
                    connector.push(command.transfer_id, layer, source, command.source_blocks, command.blocks)
                rounds += 1
            connector.flush(command.transfer_id)
            print("pushed", connector.counters.bytes, flush=True)
        except ConnectorError as error:
            print("refused", error, flush=True)


if __name__ == "__main__":
    main()
