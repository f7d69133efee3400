"""What a TCP stream of KV bytes carries: a handshake that proves the key on both sides, then sealed frames.

The sender speaks first: a nonce. The receiver answers with its own and a proof, the sender proves itself in turn. Both
proofs and the key of the session are HMACs of both nonces under the cluster's key, so that a recorded handshake opens
nothing. A frame is a prefix (bytes of the header, seal), a msgpack header and a payload. The seal is a MAC of the
header and of the frame's place in its stream: a stranger on the path can neither make up, repeat, drop nor reorder
frames unnoticed. Payloads are neither encrypted nor sealed; their checksum is against accidents.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time

import msgspec

from kv_transfer.connectors.frames import Refused
from kv_transfer.references import BlockRef

FORMAT = 2
MAX_HEADER = 1 << 17
MAX_BLOCKS = 1024  # of a frame: what one call of the kernel scatters into
MAX_STREAMS = 16  # of a sender
STUCK_SECONDS = 5.0  # in the middle of a frame without one byte

_MAGIC = b"tandem-kv-tcp-1\0"
_NONCE_BYTES, _PROOF_BYTES, _SEAL_BYTES = 32, 32, 16
_PREFIX = struct.Struct(f"<I{_SEAL_BYTES}s")
PREFIX_BYTES = _PREFIX.size


class StreamLost(OSError):
    """The stream ended or cannot be gone on with."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    """One frame: `length` bytes for some layers of `blocks`."""

    format: int
    transfer_id: str
    stream: int  # of the sender's streams; the frames of a row all take the same one
    sequence: int  # of the frame within its transfer and stream, from 0
    layer: int  # the first
    blocks: list[BlockRef]
    length: int
    checksum: int  # xxh3_64 of the payload, unpacked
    layers: int = 1  # how many
    codec: int = 0  # by which the payload was packed, see `codec`; 0: by none
    packed: int = 0  # bytes of it then
    rows: list[int] = []  # pages in which the payload lies, in memory that both sides map: then nothing follows

    @property
    def wire_bytes(self) -> int:
        """Bytes that follow the header."""
        if self.rows:
            return 0
        return self.packed if self.codec else self.length


class Seal:
    """Seals or opens what goes one way on one stream, in order."""

    def __init__(self, session_key: bytes) -> None:
        self._key = session_key
        self._num_frames = 0
        self._decoder = msgspec.msgpack.Decoder(Header)

    def close(self, header: Header) -> bytes:
        """Prefix and header, ready to send."""
        return self.close_bytes(msgspec.msgpack.encode(header))

    def close_bytes(self, encoded: bytes) -> bytes:
        """Prefix and these bytes, ready to send."""
        return _PREFIX.pack(len(encoded), self._mac(encoded)) + encoded

    def back(self) -> "Seal":
        """For the other way on this stream."""
        return Seal(hmac.digest(self._key, b"back", "sha256"))

    def header_bytes(self, prefix: bytes | bytearray) -> int:
        """Bytes of the header that follows. Raises Refused if they are too many."""
        size: int = _PREFIX.unpack(prefix)[0]
        if not 0 < size <= MAX_HEADER:
            raise Refused("malformed", f"a header of {size} bytes; 1 to {MAX_HEADER} are allowed")
        return size

    def open(self, prefix: bytes | bytearray, encoded: bytes | bytearray) -> Header:
        """The header. Raises Refused if it is not what the other side sent next, or no header."""
        self.check(prefix, encoded)
        try:
            header = self._decoder.decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused("malformed", str(error)) from error
        if header.format != FORMAT:
            raise Refused("malformed", f"format {header.format} is not known here, only {FORMAT}")
        if len(header.blocks) > MAX_BLOCKS or not 0 <= header.stream < MAX_STREAMS or header.length < 0:
            raise Refused("malformed", f"{len(header.blocks)} blocks, {header.length} bytes on stream {header.stream}")
        if header.rows and (header.codec or len(header.rows) != len(header.blocks)):
            raise Refused("malformed", f"{len(header.rows)} pages for {len(header.blocks)} blocks")
        if header.codec and (not 0 < header.packed < header.length or header.length % header.codec):
            raise Refused("malformed", f"{header.length} bytes cannot be {header.packed} by codec {header.codec}")
        return header

    def check(self, prefix: bytes | bytearray, encoded: bytes | bytearray) -> None:
        """Raises Refused if this is not what the other side sent next."""
        if not hmac.compare_digest(self._mac(encoded), _PREFIX.unpack(prefix)[1]):
            raise Refused("malformed", "the header is not sealed with the key of this stream")

    def _mac(self, encoded: bytes | bytearray) -> bytes:
        mac = hashlib.blake2b(self._num_frames.to_bytes(8, "little"), key=self._key, digest_size=_SEAL_BYTES)
        mac.update(encoded)
        self._num_frames += 1
        return mac.digest()


def greet_receiver(stream: socket.socket, key: bytes, incarnation: str, deadline: float) -> Seal:
    """The sender's half of the handshake. Raises StreamLost if the receiver lacks the key or is another one."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    write(stream, _MAGIC + ours, deadline)
    answer = read(stream, _NONCE_BYTES + _PROOF_BYTES, deadline)
    nonces = ours + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _prove(key, b"receiver", incarnation, nonces)):
        raise StreamLost("the receiver has another cluster key, or is not the one it was")
    write(stream, _prove(key, b"sender", incarnation, nonces), deadline)
    return Seal(_prove(key, b"session", incarnation, nonces))


def greet_sender(stream: socket.socket, key: bytes, incarnation: str, deadline: float) -> Seal:
    """The receiver's half of the handshake. Raises StreamLost if the sender lacks the key."""
    greeting = read(stream, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise StreamLost("this is no stream of KV bytes")
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + ours
    write(stream, ours + _prove(key, b"receiver", incarnation, nonces), deadline)
    if not hmac.compare_digest(read(stream, _PROOF_BYTES, deadline), _prove(key, b"sender", incarnation, nonces)):
        raise StreamLost("the sender has another cluster key")
    return Seal(_prove(key, b"session", incarnation, nonces))


def tune(stream: socket.socket) -> None:
    """Small frames at once; a peer that is gone without a word is noticed."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STUCK_SECONDS * 1000))


def cut(stream: socket.socket) -> None:
    """Ends a stream, from any thread: whoever waits for it is woken."""
    with contextlib.suppress(OSError):  # it has ended by itself
        stream.shutdown(socket.SHUT_RDWR)


def _prove(key: bytes, purpose: bytes, incarnation: str, nonces: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + purpose + b"\0" + incarnation.encode() + b"\0" + nonces, "sha256")


def write(stream: socket.socket, data: bytes, deadline: float) -> None:
    """Sends all of it. Raises StreamLost or TimeoutError."""
    stream.settimeout(_left(deadline))
    stream.sendall(data)


def read(stream: socket.socket, size: int, deadline: float) -> bytes:
    """Receives exactly `size` bytes. Raises StreamLost or TimeoutError."""
    data = bytearray()
    while len(data) < size:
        stream.settimeout(_left(deadline))
        piece = stream.recv(size - len(data))
        if not piece:
            raise StreamLost("the other side ended the handshake")
        data += piece
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StreamLost("the handshake takes too long")
    return left
