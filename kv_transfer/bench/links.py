"""The raw links under connectors: the plainest way to get as many bytes from the sending process into this one."""

import socket
import time
from abc import ABC, abstractmethod

import torch

from kv_transfer.bench.child import STUCK_SECONDS, Child
from kv_transfer.bench.messages import OpenDevice, OpenMemory, OpenSocket, SendRaw
from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.cuda_memory import export
from kv_transfer.connectors.shared_memory import SharedSegment


class Link(ABC):
    """A raw link for up to `num_bytes`. `sender`, `receiver`: devices of the two processes. Raises ConnectorError."""

    name: str  # for people

    @abstractmethod
    def __init__(self, child: Child, num_bytes: int, sender: str, receiver: str) -> None: ...

    @abstractmethod
    def seconds(self, num_bytes: int) -> float:
        """Of so many bytes, from the moment before they go until the last is there."""

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and memory."""


class RawMemory(Link):
    """A copy from private memory of the child's into memory that both map."""

    name = "memory copy"

    def __init__(self, child: Child, num_bytes: int, sender: str, receiver: str) -> None:
        self._child = child
        self._segment = SharedSegment(num_bytes, 1)
        child.ask(OpenMemory(f"/dev/shm/{self._segment.name}", num_bytes))

    def seconds(self, num_bytes: int) -> float:
        """The child's copy."""
        answer = self._child.ask(SendRaw(num_bytes))
        return answer.ended - answer.started

    def close(self) -> None:
        """Frees the memory."""
        self._segment.unlink()


class RawDevice(Link):
    """A copy from the child's memory on its device into memory on this one's, by the device's copy engine.

    The child maps it as `cuda_ipc` does, and waits until the copy has ended.
    """

    def __init__(self, child: Child, num_bytes: int, sender: str, receiver: str) -> None:
        self.name = "device copy" if sender == receiver else "peer copy"
        self._child = child
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=receiver)
        child.ask(OpenDevice(export(self._buffer), num_bytes, sender))
        self.seconds(num_bytes)
        if not bool((self._buffer == 1).all()):
            raise ConnectorError(f"bytes that were copied from {sender} to {receiver} are not there")

    def seconds(self, num_bytes: int) -> float:
        """The child's copy."""
        answer = self._child.ask(SendRaw(num_bytes))
        return answer.ended - answer.started

    def close(self) -> None:
        """Frees the memory."""
        self._buffer = torch.empty(0)


class RawSocket(Link):
    """A socket over loopback, read into one buffer."""

    name = "socket"

    def __init__(self, child: Child, num_bytes: int, sender: str, receiver: str) -> None:
        self._child = child
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            listener.settimeout(STUCK_SECONDS)
            child.tell(OpenSocket(listener.getsockname()[1]))
            self._socket = listener.accept()[0]
            child.hear()
        self._socket.settimeout(STUCK_SECONDS)
        self._buffer = memoryview(bytearray(num_bytes))

    def seconds(self, num_bytes: int) -> float:
        """Until the last byte was read."""
        view = self._buffer[:num_bytes]
        self._child.tell(SendRaw(num_bytes))
        while view:
            if not (received := self._socket.recv_into(view)):
                raise ConnectorError("the raw socket was closed")
            view = view[received:]
        ended = time.monotonic()
        return ended - self._child.hear().started

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
