"""Publishes KV events to routers, numbered so that a reader notices what it missed."""

import msgspec

from engine.request import KvEvent, KvEventBatch
from services.security import ClusterKey
from services.zmq_sockets import pub_socket


class EventPublisher:
    """One PUB socket; subscribers that are too slow lose messages, see the gap and ask for a snapshot."""

    def __init__(self, incarnation: str, host: str, key: ClusterKey | None) -> None:
        self._incarnation = incarnation
        self._socket, self.address = pub_socket(host, key)
        self._encoder = msgspec.msgpack.Encoder()
        self.sequence = 0  # of the last batch sent

    def publish(self, events: list[KvEvent]) -> None:
        """Sends one numbered batch."""
        self.sequence += 1
        batch = self._encoder.encode(KvEventBatch(self._incarnation, self.sequence, events))
        self._socket.send_multipart([b"kv", batch])

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
