"""Process groups of two: torch.distributed between one sender and one receiver, over gloo on CPU, NCCL on CUDA devices.

The two find each other over a stream whose handshake has proved the cluster's key; no object is ever pickled, as only
tensors of bytes cross a group. Nothing here waits for longer than a deadline: a group whose other side hangs or dies
raises, is closed and made anew. gloo and NCCL connect with sockets of their own, on the stream's address, which know
no key; so these groups are for one machine, or for networks in which nobody else is. What the other side tells in the
handshake they trust to be theirs, and crash if it is not: hence the seals, and no groups without a key.
"""

import contextlib
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from kv_transfer.connectors.frames import Refused
from kv_transfer.connectors.tcp_wire import PREFIX_BYTES, Seal, StreamLost, read, write

JOIN_SECONDS = {"gloo": 5.0, "nccl": 30.0, "nixl": 10.0, "lent_memory": 5.0}
STUCK_SECONDS = 5.0  # one tensor on its way
RECEIVER, SENDER = 0, 1  # ranks
_POLL_SECONDS = 2e-5
_MAX_ENTRY = 1 << 16
_environment = threading.Lock()


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """What one side tells the other so that they find each other. An empty key: it is ready, and says no more."""

    key: str
    value: bytes


class PairStore(dist.Store):  # type: ignore[name-defined, misc]
    """The key-value store that torch wants: what one side sets is told to the other over `stream`, sealed.

    `seal` is the sender's, as the handshake gave it. Raises StreamLost, TimeoutError or Refused.
    """

    def __init__(self, stream: socket.socket, seal: Seal, rank: int, deadline: float) -> None:
        super().__init__()
        self._stream = stream
        self._deadline = deadline
        back = seal.back()
        self._ours, self._theirs = (seal, back) if rank == SENDER else (back, seal)
        self._entries: dict[str, bytes] = {}
        self._peer_ready = False
        self._told = True  # False: what is set now stays here

    def set(self, key: str, value: bytes | str) -> None:
        """Keeps the entry, and tells it."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = data
        if self._told:
            self._tell(Entry(key, data))

    def get(self, key: str) -> bytes:
        """The entry, as soon as either side has set it."""
        while key not in self._entries:
            if self._peer_ready:
                raise StreamLost(f"the other side has joined the group without {key!r}")
            self._hear()
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all entries are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all entries are here already."""
        return all(key in self._entries for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline stays what it is."""

    def finish(self) -> None:
        """Both sides have joined: the stream is free for other things."""
        self._tell(Entry("", b""))
        while not self._peer_ready:
            self._hear()
        self._told = False

    def _tell(self, entry: Entry) -> None:
        write(self._stream, self._ours.close_bytes(msgspec.msgpack.encode(entry)), self._deadline)

    def _hear(self) -> None:
        prefix = read(self._stream, PREFIX_BYTES, self._deadline)
        size = self._theirs.header_bytes(prefix)
        if size > _MAX_ENTRY:
            raise StreamLost(f"an entry of {size} bytes; {_MAX_ENTRY} are allowed")
        encoded = read(self._stream, size, self._deadline)
        try:
            self._theirs.check(prefix, encoded)
            entry = msgspec.msgpack.decode(encoded, type=Entry)
        except (Refused, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamLost(f"not what the other side tells in the handshake: {error}") from error
        if entry.key:
            self._entries[entry.key] = entry.value
        else:
            self._peer_ready = True


class PairGroup(ABC):
    """One side of a pair. Tensors are uint8, contiguous, on `device`; all calls come from one thread.

    `connection` is the stream to the other side, watched by those that wait for it: its end is the other side's.
    """

    kind: str  # for words

    def __init__(self, device: torch.device, connection: socket.socket) -> None:
        self._device = device
        self._connection = connection
        self._stream: torch.cuda.Stream | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> None:
        """Sends the bytes. Raises StreamLost."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> None:
        """Receives exactly as many bytes as the tensor has. Raises StreamLost."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. Never raises, never waits for the other side."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for a tensor to send or receive: the same for each. Raises StreamLost if there is too little."""
        if len(self._buffer) < num_bytes:
            try:
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise StreamLost(f"{self.kind}: {first_line(error)}") from error
        return self._buffer[:num_bytes]

    def work(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """What the device does inside runs beside other work, once `after` has happened."""
        return contextlib.nullcontext() if self._stream is None else self._beside(self._stream, after)

    def finish(self) -> None:
        """Returns when the device has done what it was given. Raises StreamLost if it takes too long."""
        if self._stream is not None:
            self._wait_until(recorded(self._stream).query)

    @contextlib.contextmanager
    def _beside(self, stream: torch.cuda.Stream, after: torch.cuda.Event | None) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield

    def _wait_until(self, done: Callable[[], bool], seconds: float | None = None, *, watch: bool = True) -> None:
        """Raises StreamLost, having left the group, if it takes longer or, where it is watched, the peer has gone."""
        seconds = STUCK_SECONDS if seconds is None else seconds
        ends = time.monotonic() + seconds
        while not done():
            lost = f"not done in {seconds:g} s" if time.monotonic() > ends else ""
            if watch and not lost and _has_ended(self._connection):
                lost = "the other side has gone"
            if lost:
                self.close()
                raise StreamLost(f"{self.kind}: {lost}")
            time.sleep(_POLL_SECONDS)


def join(stream: socket.socket, seal: Seal, rank: int, device: torch.device) -> PairGroup:
    """Makes a group with the process at the other end of `stream`, which does the same. Raises StreamLost.

    The stream is not blocking afterwards.
    """
    if device.type == "cpu":
        return meet("gloo", stream, seal, rank, lambda store: _GlooPair(store, rank, stream))
    return meet("nccl", stream, seal, rank, lambda store: _NcclPair(store, rank, device, stream))


class _Closable(Protocol):
    def close(self) -> None: ...


_Met = TypeVar("_Met", bound=_Closable)


def meet(kind: str, stream: socket.socket, seal: Seal, rank: int, make: Callable[[PairStore], _Met]) -> _Met:
    """What `make` makes with a store that both sides have in common, as `join` says."""
    store = PairStore(stream, seal, rank, time.monotonic() + JOIN_SECONDS[kind])
    group: _Met | None = None
    try:
        if rank == SENDER:
            store.set("joins", b"")  # the receiver joins when it hears something, and NCCL's sender would only listen
        group = make(store)
        store.finish()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:  # torch's words for entries that make no sense
        if group is not None:
            group.close()
        raise StreamLost(f"no {kind} group with the other side: {first_line(error)}") from error
    stream.setblocking(False)
    return group


class _GlooPair(PairGroup):
    kind = "gloo"

    def __init__(self, store: PairStore, rank: int, connection: socket.socket) -> None:
        super().__init__(torch.device("cpu"), connection)
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=connection.getsockname()[0])]
        options._timeout = timedelta(seconds=JOIN_SECONDS["gloo"] / 5)  # of an attempt to connect; it makes five
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> None:
        try:
            self._group.send([tensor], self._peer, 0).wait(_patience())
        except RuntimeError as error:
            raise StreamLost(f"gloo: {first_line(error)}") from error

    def receive(self, tensor: torch.Tensor) -> None:
        try:
            self._group.recv([tensor], self._peer, 0).wait(_patience())
        except RuntimeError as error:
            raise StreamLost(f"gloo: {first_line(error)}") from error

    def close(self) -> None:
        self._group = None


class _NcclPair(PairGroup):
    """A communicator and a stream of its own."""

    kind = "nccl"

    def __init__(self, store: PairStore, rank: int, device: torch.device, connection: socket.socket) -> None:
        super().__init__(device, connection)
        self._peer = 1 - rank
        self._aborted = False
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=JOIN_SECONDS["nccl"])
        # A pair that hangs is ended here, by `_wait_until`: torch's own watchdog would end the process.
        with environment(_WATCHDOG):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # unless somebody chose an interface
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)  # its stubs lack most of it
        # The communicator is made with the first tensor, by way of the store: so that happens now.
        try:
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            with self.work(recorded(device)):
                if rank == SENDER:
                    self.send(probe)
                else:
                    self.receive(probe)
            assert self._stream is not None
            self._wait_until(recorded(self._stream).query, JOIN_SECONDS["nccl"], watch=False)
        except BaseException:
            self.close()
            raise

    def send(self, tensor: torch.Tensor) -> None:
        self._behind(lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> None:
        self._behind(lambda: self._group.recv([tensor], self._peer, 0))

    def close(self) -> None:
        if not self._aborted:
            self._aborted = True
            with contextlib.suppress(RuntimeError):
                self._group.abort()  # kernels that wait for the other side end

    def _behind(self, begin: Callable[[], Any]) -> None:
        """Puts the stream behind a transfer; this does not wait for it."""
        try:
            begin().wait()
        except RuntimeError as error:
            raise StreamLost(f"nccl: {first_line(error)}") from error


_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would ask a store in Python each second, and log that it cannot
}


@contextlib.contextmanager
def environment(settings: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """What a library reads of this process's environment inside; others wait until it has."""
    with _environment:
        if unless_set:
            settings = {name: value for name, value in settings.items() if name not in os.environ}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def recorded(where: torch.device | torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that a stream, or a device's present one, was given so far."""
    stream = torch.cuda.current_stream(where) if isinstance(where, torch.device) else where
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _patience() -> timedelta:
    """With gloo, a tensor that takes longer fails, and with it the pair: nothing of it comes later."""
    return timedelta(seconds=STUCK_SECONDS)


def _has_ended(stream: socket.socket) -> bool:
    """Whether the other side has closed it or died; what it says is left to be read."""
    poll = select.poll()
    poll.register(stream, select.POLLRDHUP)
    return bool(poll.poll(0))


def first_line(error: BaseException) -> str:
    """What a library says, without where it was."""
    return str(error).partition("\n")[0][:300]
