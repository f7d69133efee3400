"""Where workers push tokens: one ZMQ socket for the whole gateway, one message per engine step and worker."""

from __future__ import annotations

from typing import Protocol

import msgspec
import structlog

from engine.request import TokenBatch, TokenOutput
from services.security import ClusterKey
from services.zmq_sockets import pull_socket

log = structlog.get_logger()


class Receiver(Protocol):
    """Takes the outputs of one request id."""

    def receive(self, output: TokenOutput) -> None:
        """Called on the event loop for each output, in the order in which a worker sent them."""


class TokenSocket:
    """Hands each output to the receiver that is registered for its request id; others are dropped."""

    def __init__(self, host: str, key: ClusterKey | None) -> None:
        self._socket, self.address = pull_socket(host, key)
        self._receivers: dict[str, Receiver] = {}
        self._decoder = msgspec.msgpack.Decoder(TokenBatch)
        self.malformed = 0

    def register(self, request_id: str, receiver: Receiver) -> None:
        """From now on outputs of `request_id` go to `receiver`."""
        self._receivers[request_id] = receiver

    def unregister(self, request_id: str) -> None:
        """Nobody wants the request's outputs any more."""
        self._receivers.pop(request_id, None)

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
        for output in batch.outputs:
            if receiver := self._receivers.get(output.request_id):
                receiver.receive(output)
