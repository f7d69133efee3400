"""The sending process of `tandem kv bench`: one command a line on stdin, in JSON; one answer a line on stdout."""

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from kv_transfer.bench.connectors import WAYS
from kv_transfer.bench.messages import (
    Answer,
    Close,
    Command,
    Open,
    OpenDevice,
    OpenMemory,
    OpenSocket,
    Push,
    SendRaw,
    pattern,
)
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ConnectorError, SenderConnector
from kv_transfer.connectors.cuda_memory import MappedMemory


class _Sender:
    def __init__(self) -> None:
        self._connector: SenderConnector | None = None
        self._cache = torch.empty(0)
        self._send_raw: Callable[[int], object] | None = None
        self._close_raw: Callable[[], object] | None = None

    def do(self, command: Command) -> Answer:
        started = time.monotonic()
        match command:
            case Open():
                self._cache = pattern(command.shape, _current(command.device))
                if self._cache.is_cuda:
                    torch.cuda.synchronize(self._cache.device)
                self._connector = WAYS[command.way].send(command)
            case Push(transfer_id, num_layers, source_blocks, blocks, sums):
                assert self._connector is not None
                step = num_layers if self._cache.is_cuda else 1  # as engines compute them: by graphs, or one by one
                for layer in range(0, num_layers, step):
                    layers = range(layer, layer + step)
                    self._connector.push_layers(transfer_id, layers, self._cache, source_blocks, blocks)
                self._connector.flush(transfer_id)
                ended = time.monotonic()
                return Answer(started, ended, page_sums(self._cache, source_blocks) if sums else [])
            case OpenMemory():
                self._open_memory(command)
            case OpenDevice():
                self._open_device(command)
            case OpenSocket(port):
                self._open_socket(port)
            case SendRaw(num_bytes):
                assert self._send_raw is not None
                self._send_raw(num_bytes)
            case Close():
                self._close()
        return Answer(started, time.monotonic())

    def _open_memory(self, to: OpenMemory) -> None:
        descriptor = os.open(Path(to.path), os.O_RDWR)
        mapping = np.frombuffer(mmap.mmap(descriptor, to.size), np.uint8)
        os.close(descriptor)
        source = np.ones(to.size, np.uint8)

        def copy(num_bytes: int) -> None:
            mapping[:num_bytes] = source[:num_bytes]

        self._send_raw = copy

    def _open_device(self, to: OpenDevice) -> None:
        device = torch.device(_current(to.device))
        source = torch.ones(to.size, dtype=torch.uint8, device=device)
        mapped = MappedMemory(to.memory, to.size, device)

        def copy(num_bytes: int) -> None:
            mapped.write(source[:num_bytes])
            torch.cuda.current_stream(device).synchronize()

        self._send_raw, self._close_raw = copy, mapped.close

    def _open_socket(self, port: int) -> None:
        connection = socket.create_connection(("127.0.0.1", port), 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source = np.empty(0, np.uint8)

        def send(num_bytes: int) -> None:
            nonlocal source
            if len(source) < num_bytes:
                source = np.ones(num_bytes, np.uint8)
            connection.sendall(source[:num_bytes].data)

        self._send_raw, self._close_raw = send, connection.close

    def _close(self) -> None:
        if self._connector is not None:
            self._connector.close()
        if self._close_raw is not None:
            self._close_raw()
        self._connector = self._send_raw = self._close_raw = None
        self._cache = torch.empty(0)


def _current(device: str) -> str:
    """The device, which is the process's present one from now on if it is a CUDA device."""
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    return device


def main() -> None:
    """Obeys until stdin ends."""
    torch.set_num_threads(1)
    decoder = msgspec.json.Decoder(Command)
    sender = _Sender()
    for line in sys.stdin.buffer:
        command = decoder.decode(line)
        try:
            answer = sender.do(command)
        except (ConnectorError, OSError, RuntimeError) as failure:  # the last is what torch and devices raise
            answer = Answer(0.0, 0.0, error=str(failure) or repr(failure))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
