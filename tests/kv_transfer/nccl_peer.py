"""A sender on its own device, in a process of its own: reads one command in JSON a line, says what became of it."""

import sys
import time

import msgspec
import torch

from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.distributed import DistributedSender
from kv_transfer.connectors.nixl import NixlSender
from kv_transfer.references import BlockRef


class Command(msgspec.Struct):
    kind: str  # of connector
    description: bytes
    layout: str
    shape: list[int]  # of the source cache, bfloat16, filled from 0 upwards
    device: int
    transfer_id: str
    source_blocks: list[int]
    blocks: list[BlockRef]
    repeat: int = 1  # of all layers; 0: until killed


def source(shape: list[int], device: torch.device) -> torch.Tensor:
    """A cache in which no two places of eight bytes are equal."""
    words = torch.arange(int(torch.tensor(shape).prod()) // 4, dtype=torch.int64, device=device)
    return words.view(torch.bfloat16).view(shape)


def wait_for_bytes(connector: DistributedSender, carried: int) -> None:
    """Until more bytes than that are out, or a minute; `flush` says what went wrong."""
    ends = time.monotonic() + 60
    while connector.counters.bytes == carried and time.monotonic() < ends:
        time.sleep(0.005)


def main() -> None:
    connector: DistributedSender | None = None
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        device = torch.device("cuda", command.device)
        torch.cuda.set_device(device)
        cache = source(command.shape, device)
        rounds = 0
        try:
            if connector is None:
                kind = NixlSender if command.kind == "nixl" else DistributedSender
                connector = kind(command.description, command.layout, b"k" * 32, device)
            carried = connector.counters.bytes
            while command.repeat == 0 or rounds < command.repeat:
                for layers in (range(1), range(1, command.shape[1])):
                    connector.push_layers(command.transfer_id, layers, cache, command.source_blocks, command.blocks)
                rounds += 1
                if rounds == 1:
                    wait_for_bytes(connector, carried)
                    print("pushing", flush=True)
                time.sleep(0.002)  # as pushes are only queued
            connector.flush(command.transfer_id)
            print("pushed", rounds, flush=True)
        except ConnectorError as error:
            print("refused", error, flush=True)


if __name__ == "__main__":
    main()
