"""Sends tokens to gateways: one ZMQ message per engine step and gateway."""

import contextlib
from collections import defaultdict

import msgspec
import structlog
import zmq

from engine.request import TokenBatch, TokenOutput
from services.security import ClusterKey
from services.zmq_sockets import push_socket

log = structlog.get_logger()


class TokenPublisher:
    """One PUSH socket per gateway. Never blocks: what a dead or stuck gateway does not take is dropped and counted."""

    def __init__(self, incarnation: str, key: ClusterKey | None) -> None:
        self._incarnation = incarnation
        self._key = key
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._sequence: dict[str, int] = defaultdict(int)
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped_batches = 0

    def publish(self, reply_to: str, outputs: list[TokenOutput]) -> None:
        """Queues `outputs` for the gateway whose token socket is `reply_to`."""
        socket = self._sockets.get(reply_to)
        if socket is None:
            socket = self._sockets[reply_to] = push_socket(reply_to, self._key)
        batch = TokenBatch(self._incarnation, self._sequence[reply_to], outputs)
        self._sequence[reply_to] += 1
        try:
            socket.send(self._encoder.encode(batch), zmq.DONTWAIT)
        except zmq.Again:
            self.dropped_batches += 1
            log.warning("tokens dropped: the gateway does not take them", gateway=reply_to)

    def count(self) -> None:
        """Tells each gateway how many batches it was sent, so that it misses the last ones, too, if they got lost."""
        for reply_to, socket in self._sockets.items():
            with contextlib.suppress(zmq.Again):
                batch = TokenBatch(self._incarnation, self._sequence[reply_to], [])
                socket.send(self._encoder.encode(batch), zmq.DONTWAIT)

    def forget(self, reply_to: str) -> None:
        """Closes the socket of a gateway that is gone."""
        if socket := self._sockets.pop(reply_to, None):
            socket.close(linger=0)
        self._sequence.pop(reply_to, None)

    def close(self) -> None:
        """Closes all sockets; waits briefly for what is queued."""
        for socket in self._sockets.values():
            socket.close(linger=200)
        self._sockets.clear()
