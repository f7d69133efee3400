"""Where workers push tokens: one ZMQ socket for the whole gateway, one message per engine step and worker.

What is on its way when a connection ends is lost, so each worker numbers its messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from engine.request import TokenBatch, TokenOutput
from services.security import ClusterKey
from services.zmq_sockets import pull_socket

log = structlog.get_logger()

_WORKERS = 1 << 14  # whose messages are counted; those that are gone go first


class Receiver(Protocol):
    """Takes the outputs of one request id."""

    def receive(self, output: TokenOutput) -> None:
        """Called on the event loop for each output, in the order in which a worker sent them."""


class TokenSocket:
    """Hands each output to the receiver that is registered for its request id; others are dropped."""

    def __init__(self, host: str, key: ClusterKey | None) -> None:
        self._socket, self.address = pull_socket(host, key)
        self._next: dict[str, int] = {}  # number of the message that is due, by worker
        self._on_gap: list[Callable[[str], None]] = []
        self._receivers: dict[str, Receiver] = {}
        self._decoder = msgspec.msgpack.Decoder(TokenBatch)
        self.malformed = 0

    def register(self, request_id: str, receiver: Receiver) -> None:
        """From now on outputs of `request_id` go to `receiver`."""
        self._receivers[request_id] = receiver

    def unregister(self, request_id: str) -> None:
        """Nobody wants the request's outputs any more."""
        self._receivers.pop(request_id, None)

    def on_gap(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with a worker's incarnation when messages of it got lost."""
        self._on_gap.append(callback)

    async def run(self) -> None:
        """Receives for ever."""
        while True:
            self._dispatch(await self._socket.recv())

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)

    def _dispatch(self, frame: bytes) -> None:
        try:
            batch = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            self.malformed += 1
            log.warning("a malformed token message was dropped", error=str(error))
            return
        self._follow(batch)
        for output in batch.outputs:
            if receiver := self._receivers.get(output.request_id):
                receiver.receive(output)

    def _follow(self, batch: TokenBatch) -> None:
        """A worker that took this gateway for gone begins at 0 again."""
        due = self._next.pop(batch.incarnation, 0)
        self._next[batch.incarnation] = batch.sequence + bool(batch.outputs)  # the last one, as heard of latest
        while len(self._next) > _WORKERS:
            del self._next[next(iter(self._next))]
        if batch.sequence > due:
            log.warning("token messages got lost", worker=batch.incarnation, messages=batch.sequence - due)
            for callback in self._on_gap:
                callback(batch.incarnation)
