"""Publishes KV events to routers, numbered so that a reader notices what it missed, and kept so that it can have it."""

from collections import deque

import msgspec

from engine.request import KvEvent, KvEventBatch
from services.security import ClusterKey
from services.zmq_sockets import pub_socket

_KEPT_BATCHES = 4096
_KEPT_BYTES = 16 << 20


class EventPublisher:
    """One PUB socket; subscribers that are too slow lose messages, see the gap and ask for what they missed."""

    def __init__(self, incarnation: str, host: str, key: ClusterKey | None) -> None:
        self._incarnation = incarnation
        self._socket, self.address = pub_socket(host, key)
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[bytes] = deque()  # the latest batches
        self._kept_bytes = 0
        self.sequence = 0  # of the last batch sent

    def publish(self, events: list[KvEvent]) -> None:
        """Sends one numbered batch."""
        self.sequence += 1
        batch = self._encoder.encode(KvEventBatch(self._incarnation, self.sequence, events))
        self._kept.append(batch)
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        self._socket.send_multipart([b"kv", batch])

    def beat(self) -> None:
        """Says what the last batch was, so that its loss is noticed, too. To be called twice a second or so."""
        beat = self._encoder.encode(KvEventBatch(self._incarnation, self.sequence, []))
        self._socket.send_multipart([b"kv", beat])

    def since(self, sequence: int) -> list[bytes] | None:
        """All batches behind that one. None: they are not kept any more."""
        missed = self.sequence - sequence
        if missed <= 0:
            return []
        return list(self._kept)[-missed:] if missed <= len(self._kept) else None

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
