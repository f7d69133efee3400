"""The sending process of `tandem kv bench`: one command a line on stdin, in JSON; one answer a line on stdout.

Times are of the monotonic clock, which all processes of a host share.
"""

import mmap
import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from kv_transfer.connectors.base import ConnectorError, SenderConnector
from kv_transfer.connectors.distributed import DistributedSender
from kv_transfer.connectors.shared_memory import SharedMemorySender
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import Secure, ZmqSender
from kv_transfer.references import BlockRef


class Open(msgspec.Struct, tag=True):
    """Opens a connector to the pool of `description` and fills a cache of `shape` with `pattern`."""

    kind: str
    description: bytes
    layout: str
    shape: list[int]
    key: bytes  # of TCP streams, and of those that headers for gloo take
    curve: list[bytes]  # public and secret key of ZMQ sockets; empty: not encrypted


class Push(msgspec.Struct, tag=True):
    """Pushes all layers, or only the first, of these blocks."""

    transfer_id: str
    num_layers: int
    source_blocks: list[int]
    blocks: list[BlockRef]


class OpenMemory(msgspec.Struct, tag=True):
    """Maps a file of the other side's."""

    path: str
    size: int


class CopyMemory(msgspec.Struct, tag=True):
    """Copies so many bytes into the mapping."""

    num_bytes: int


class OpenSocket(msgspec.Struct, tag=True):
    """Connects a socket to a port of this host."""

    port: int


class SendSocket(msgspec.Struct, tag=True):
    """Sends so many bytes over the socket."""

    num_bytes: int


Command = Open | Push | OpenMemory | CopyMemory | OpenSocket | SendSocket


class Answer(msgspec.Struct):
    """When the command began and ended; or why it failed."""

    started: float
    ended: float
    error: str = ""


def pattern(shape: list[int]) -> torch.Tensor:
    """A bfloat16 cache in which no two places of eight bytes are equal."""
    return torch.arange(int(np.prod(shape)) // 4, dtype=torch.int64).view(torch.bfloat16).view(shape)


def secure(curve: list[bytes]) -> Secure:
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


class _Sender:
    def __init__(self) -> None:
        self._connector: SenderConnector | None = None
        self._cache = torch.empty(0)
        self._mapping = np.empty(0, np.uint8)
        self._socket: socket.socket | None = None
        self._bytes = np.empty(0, np.uint8)

    def do(self, command: Command) -> None:
        match command:
            case Open(kind, description, layout, shape, key, curve):
                if self._connector is not None:
                    self._connector.close()
                if kind == "shared_memory":
                    self._connector = SharedMemorySender(description, layout)
                elif kind == "gloo":
                    self._connector = DistributedSender(description, layout, key, torch.device("cpu"))
                elif kind == "tcp":
                    self._connector = TcpSender(description, layout, key)
                else:
                    self._connector = ZmqSender(description, layout, secure(curve))
                self._cache = pattern(shape)
            case Push(transfer_id, num_layers, source_blocks, blocks):
                assert self._connector is not None
                for layer in range(num_layers):
                    self._connector.push(transfer_id, layer, self._cache, source_blocks, blocks)
                self._connector.flush(transfer_id)
            case OpenMemory(path, size):
                descriptor = os.open(Path(path), os.O_RDWR)
                self._mapping = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
                os.close(descriptor)
                self._bytes = np.ones(size, np.uint8)
            case CopyMemory(num_bytes):
                self._mapping[:num_bytes] = self._bytes[:num_bytes]
            case OpenSocket(port):
                self._socket = socket.create_connection(("127.0.0.1", port), 10)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            case SendSocket(num_bytes):
                assert self._socket is not None
                if len(self._bytes) < num_bytes:
                    self._bytes = np.ones(num_bytes, np.uint8)
                self._socket.sendall(self._bytes[:num_bytes].data)


def main() -> None:
    """Obeys until stdin ends."""
    torch.set_num_threads(1)
    decoder = msgspec.json.Decoder(Command)
    sender = _Sender()
    for line in sys.stdin.buffer:
        command = decoder.decode(line)
        started, error = time.monotonic(), ""
        try:
            sender.do(command)
        except (ConnectorError, OSError) as failure:
            error = str(failure)
        answer = Answer(started, time.monotonic(), error)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
