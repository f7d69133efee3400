"""A receiver of KV over TCP, and a stream to it that knows the key and tells lies."""

import socket
import time
from collections.abc import Callable

import msgspec
import torch
import xxhash
from frame_faults import BLOCKS, GENERATION, LAYERS, REFS, ROW, D, L

from kv_transfer.connectors import tcp_wire
from kv_transfer.connectors.base import PoolDescription
from kv_transfer.connectors.codec import CODECS
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_wire import Seal, greet_receiver
from kv_transfer.references import BlockRef

KEY = b"k" * 32


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.002)


class Liar(Seal):
    """Seals whatever it is given."""

    def seal(self, encoded: bytes) -> bytes:
        return len(encoded).to_bytes(4, "little") + self._mac(encoded) + encoded


class Wire:
    """A receiver, a stream that knows the key and tells lies, and an honest one."""

    def __init__(self, codecs: tuple[int, ...] = CODECS) -> None:
        self.tensor = torch.zeros(BLOCKS, LAYERS, 4, 2, 8)
        pool = PoolDescription(D, BLOCKS, LAYERS * ROW, ROW, L)
        self.receiver = TcpReceiver(self.tensor, pool, lambda block: GENERATION, "127.0.0.1", KEY, codecs)
        self.marks = 0
        self.connect()

    def connect(self) -> None:
        self.socket = self.call()
        seal = greet_receiver(self.socket, KEY, D, time.monotonic() + 10)
        self.liar = Liar(seal._key)

    def call(self) -> socket.socket:
        port = msgspec.msgpack.decode(self.receiver.describe())["port"]
        return socket.create_connection(("127.0.0.1", port), 10)

    def send(self, header: bytes, payload: bytes = b"") -> None:
        self.socket.sendall(self.liar.seal(header) + payload)

    def settle(self) -> None:
        """All that was sent is handled; if the stream was ended for it, there is a new one."""
        self.marks += 1
        key, ref = f"mark{self.marks}/0", BlockRef(D, 3, GENERATION)
        self.receiver.expect(key, [ref])
        try:
            self.send(*message(transfer_id=key, blocks=[ref]))
            ended = False
        except OSError:
            ended = True
        self.socket.settimeout(0.002)
        ends = time.monotonic() + 30
        while self.receiver.bytes_landed(key) != ROW:
            assert time.monotonic() < ends, "the receiver is dead"
            try:
                ended = ended or self.socket.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                ended = True
            if ended:
                self.socket.close()
                self.connect()
                break
        self.receiver.finish(key)
        self.tensor[3].zero_()
        self.socket.settimeout(10)

    def close(self) -> None:
        self.socket.close()
        self.receiver.close()


def message(
    payload: bytes | None = None, *, damaged: bool = False, without: int = 0, **changes: object
) -> tuple[bytes, bytes]:
    """A good frame of one layer of REFS, but for `changes`."""
    blocks = changes.get("blocks", REFS)
    data = payload if payload is not None else b"\x01" * (ROW * len(blocks))  # type: ignore[arg-type]
    header = {"format": tcp_wire.FORMAT, "transfer_id": "r/0", "stream": 0, "sequence": 0, "layer": 0, "blocks": blocks}
    header |= {"length": len(data), "checksum": xxhash.xxh3_64_intdigest(data)} | changes
    encoded = msgspec.msgpack.encode(list(header.values()))
    return encoded[: len(encoded) - without], (b"\x02" + data[1:] if damaged else data)
