"""NIXL: KV bytes over what UCX finds between two processes: the kernel's copies, NVLink, InfiniBand, TCP.

Headers, books and rules are those of `distributed`; a payload is read by the receiver, out of memory that the sender
lends it. Were it written by the sender, the pool would be registered for that, and a writer that hangs on another host
could be shut out only by taking the whole pool back. So nothing of a receiver can be reached from outside: it reads
into memory of its own and, if the transfer is still expected then, copies that into pages. This costs a copy and shuts
anybody out at once. The sender lends no page either, but the copy of one frame.

Each pair has an agent on either side. What the library is told of the other side it trusts, and crashes if that makes
no sense; it comes sealed with the stream's key. UCX's own sockets know no key: they are for one machine, whose loopback
they keep to if the stream does, or for networks in which nobody else is.
"""

import contextlib
import importlib
import importlib.util
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import torch

from kv_transfer.connectors.base import Capabilities, ConnectorError, PoolDescription
from kv_transfer.connectors.distributed import (
    DistributedReceiver,
    DistributedSender,
    ReceivingPair,
    SendingPair,
    frame_bytes,
)
from kv_transfer.connectors.process_group import (
    RECEIVER,
    SENDER,
    PairGroup,
    PairStore,
    environment,
    first_line,
    meet,
)
from kv_transfer.connectors.tcp import ReceivingStream, is_loopback
from kv_transfer.connectors.tcp_wire import Seal, StreamLost

CAPABILITIES = Capabilities("nixl", cross_host=True, one_sided=False)
_BACKEND = "UCX"
_UNDER_WAY, _DONE = "PROC", "DONE"  # its words for how far a transfer is


class _Loan(msgspec.Struct, array_like=True, frozen=True):
    """Memory that the receiver may read, and the agent that lends it."""

    address: int
    size: int  # bytes
    device: int
    agent: bytes  # as the library describes it


class NixlPair(PairGroup):
    """An agent on each side. The sender lends `lent_bytes` for as long as the pair stands, and sends nothing larger."""

    kind = "nixl"

    def __init__(
        self, store: PairStore, rank: int, device: torch.device, connection: socket.socket, lent_bytes: int = 0
    ) -> None:
        super().__init__(device, connection)
        self._memory = "DRAM" if device.type == "cpu" else "VRAM"
        self._registered: Any = None
        self._loan: _Loan | None = None  # the sender's
        self._peer = ""
        self._number = 0  # of the last tensor
        self._read: Any = None  # of a tensor that comes, with its state
        self._state = ""
        with self.work(), _library_errors():
            self._agent: Any = _make_agent(connection)
            try:
                self._join(store, rank, lent_bytes)
            except BaseException:
                self.close()
                raise

    def _join(self, store: PairStore, rank: int, lent_bytes: int) -> None:
        if rank == SENDER:
            place = self._place(self.buffer(lent_bytes))
            self._loan = _Loan(*place, self._agent.get_agent_metadata())
            store.set("loan", msgspec.msgpack.encode(self._loan))
            peer = store.get("reader")
        else:
            store.set("reader", self._agent.get_agent_metadata())
            loan = msgspec.msgpack.decode(store.get("loan"), type=_Loan)
            peer = loan.agent
        self._peer = self._agent.add_remote_agent(peer).decode()
        # The library finds its way between the two with the first tensor: so that goes now.
        if rank == SENDER:
            self.send(self.buffer(1))
        else:
            self._loan = loan
            self.receive(self.buffer(1))

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory that the library knows; a sender's stays the same."""
        if len(self._buffer) < num_bytes:
            with self.work(), _library_errors():
                if self._registered is not None:
                    self._agent.deregister_memory(self._registered)
                memory = super().buffer(num_bytes)
                self._registered = self._agent.register_memory([memory])
        return self._buffer[:num_bytes]

    def send(self, tensor: torch.Tensor) -> None:
        """Returns when the receiver has read it."""
        assert self._loan is not None
        if tensor.data_ptr() != self._loan.address or len(tensor) > self._loan.size:
            raise StreamLost(f"nixl: {len(tensor)} bytes lie elsewhere than in the {self._loan.size} that are lent")
        word = self._next()
        with _library_errors():
            self._wait_until(lambda: word in self._agent.get_new_notifs().get(self._peer, ()))

    def receive(self, tensor: torch.Tensor) -> None:
        """Reads it where the sender has it, and tells the sender when that is done."""
        assert self._loan is not None
        if len(tensor) > self._loan.size:
            raise StreamLost(f"nixl: {len(tensor)} bytes are more than the {self._loan.size} that are lent")
        with _library_errors():
            here = self._agent.get_xfer_descs([self._place(tensor)], self._memory)
            there = self._agent.get_xfer_descs([(self._loan.address, len(tensor), self._loan.device)], self._memory)
            self._read = self._agent.initialize_xfer("READ", here, there, self._peer, self._next())
            self._state = self._agent.transfer(self._read)
            if self._state == _UNDER_WAY:
                self._wait_until(self._has_been_read)
            if self._state != _DONE:
                raise StreamLost("nixl: the tensor could not be read")
            self._read.release()
            self._read = None

    def close(self) -> None:
        """Ends a read that is under way: nothing is written into the buffer any more."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with self.work():
            if self._read is not None:
                with contextlib.suppress(Exception):
                    self._read.release()
                if self._stream is not None:  # what its device was told to copy, it does
                    with contextlib.suppress(RuntimeError):
                        torch.cuda.synchronize(self._device)
            self._read = self._registered = agent = None  # the last references: it ends here

    def _has_been_read(self) -> bool:
        self._state = self._agent.check_xfer_state(self._read)
        return self._state != _UNDER_WAY

    def _next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(8, "little")

    @staticmethod
    def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
        return tensor.data_ptr(), len(tensor), max(0, tensor.get_device())


class NixlReceiver(DistributedReceiver):
    """Receives into `tensor` [num_blocks, L, page, heads, 2 * dim] on any device. Raises ConnectorError."""

    def __init__(
        self, tensor: torch.Tensor, pool: PoolDescription, generation: Callable[[int], int], host: str, key: bytes
    ) -> None:
        _library()
        super().__init__(tensor, pool, generation, host, key)
        self.capabilities = CAPABILITIES

    def _make_stream(self, connection: socket.socket) -> ReceivingStream:
        return _ReceivingPair(self, connection)


class _ReceivingPair(ReceivingPair):
    def _join(self, connection: socket.socket, seal: Seal) -> PairGroup:
        device = self._receiver.pages.device
        return meet("nixl", connection, seal, RECEIVER, lambda store: NixlPair(store, RECEIVER, device, connection))


class _SendingPair(SendingPair):
    def _join(self, connection: socket.socket, device: torch.device) -> PairGroup:
        lent = max(frame_bytes(device), self._offer.pool.block_bytes)  # a frame is one row at least
        return meet("nixl", connection, self._seal, SENDER, lambda s: NixlPair(s, SENDER, device, connection, lent))


class NixlSender(DistributedSender):
    """Sends rows that lie on `device`. Raises ConnectorError as DistributedSender does, and where NIXL is missing."""

    _stream_type = _SendingPair

    def __init__(self, description: bytes, layout: str, key: bytes, device: torch.device) -> None:
        _library()
        super().__init__(description, layout, key, device)


def is_installed() -> bool:
    """Whether there is a NIXL for this build of torch."""
    return any(map(importlib.util.find_spec, _packages()))


def _packages() -> list[str]:
    """They are named after versions of CUDA; where there is none, each will do."""
    major = (torch.version.cuda or "").partition(".")[0]
    return [f"nixl_cu{major}"] if major else ["nixl_cu12", "nixl_cu13"]


@cache
def _library() -> Any:
    """Raises ConnectorError."""
    installed = filter(importlib.util.find_spec, _packages())
    if (package := next(installed, None)) is None:
        extra = "nixl-cu13" if _packages() == ["nixl_cu13"] else "nixl"
        raise ConnectorError(f"NIXL is not installed: pip install 'tandem-serve[{extra}]'")
    # It tells a lot, on stdout, unless somebody chose otherwise.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:
        raise ConnectorError(f"NIXL does not load here: {error}") from error


def _make_agent(connection: socket.socket) -> Any:
    library = _library()
    # UCX listens on all devices, unless it or somebody is told which.
    settings = {"UCX_NET_DEVICES": "lo"} if is_loopback(connection.getsockname()[0]) else {}
    with environment(settings, unless_set=True):
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        agent = library.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
    if _BACKEND not in agent.backends:
        raise StreamLost(f"nixl: the installed one lacks {_BACKEND}")
    return agent


@contextlib.contextmanager
def _library_errors() -> Iterator[None]:
    """What the library raises derives from nothing but Exception. Raises StreamLost instead."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise StreamLost(f"nixl: {first_line(error) or type(error).__name__}") from error
