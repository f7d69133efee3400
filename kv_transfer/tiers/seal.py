"""What goes before a block that others keep for us: what it is, and a proof that we wrote it.

With a key the proof is HMAC-SHA256 of what it is and of all its bytes, under a key that is derived from the cluster's,
so that who can write into the store still cannot make us take other bytes for a block. Without one it is xxh3_64,
against accidents alone.

A block may be packed under its seal (`kv_transfer.connectors.codec`), without loss. What is proved then is what was
written, before anything is unpacked, and no more is unpacked than a block; a checksum of the block is compared behind
that.
"""

import hmac
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from kv_transfer.connectors.codec import CODECS, pack, unpack
from kv_transfer.connectors.frames import Refused
from kv_transfer.tiers.store import BlockFormat, checksum

_HEAD = struct.Struct("<4sI16s16s")  # magic; version, and above its byte the codec, 0 for none; format, hash
_MAGIC, _VERSION = b"TNDM", 1
_SUM = struct.Struct("<Q")  # of the block, before what is packed
_PROOF_BYTES = 32
SEAL_BYTES = _HEAD.size + _PROOF_BYTES


class Seal:
    """Seals blocks of one format. `key`: of the cluster; empty: none. `codec`: what packs them; 0: nothing does.

    Packed or not, any of them opens both.
    """

    def __init__(self, format: BlockFormat, key: bytes, codec: int = 0) -> None:
        self._format = format
        self._codec = codec
        self._key = hmac.digest(key, b"tandem kv tier", "sha256") if key else b""

    @property
    def mark(self) -> str:
        """Names the key without telling it: who has another one cannot open what is sealed, nor need they find it."""
        return hmac.digest(self._key, b"mark", "sha256")[:8].hex() if self._key else "open"

    def close(self, block_hash: bytes, block: memoryview) -> bytes:
        """The block under its seal, SEAL_BYTES longer than it, or packed to less than that."""
        codec, body = self._codec, [block]
        if codec:
            body = [memoryview(_SUM.pack(checksum(block))), *pack(np.frombuffer(block, np.uint8), codec)]
            if sum(piece.nbytes for piece in body) >= block.nbytes:
                codec, body = 0, [block]
        head = _HEAD.pack(_MAGIC, _VERSION | codec << 8, self._format.digest, block_hash)
        return b"".join((head, self._proof(head, body), *body))

    def open(self, block_hash: bytes, value: memoryview, into: memoryview) -> bool:
        """Whether `value` is that block under its seal; its bytes are in `into` then."""
        block_bytes = self._format.block_bytes
        if not SEAL_BYTES < value.nbytes <= SEAL_BYTES + block_bytes:
            return False
        head, body = bytes(value[: _HEAD.size]), value[SEAL_BYTES:]
        magic, version, format, key = _HEAD.unpack(head)
        if (magic, version & 0xFF, format, key) != (_MAGIC, _VERSION, self._format.digest, block_hash):
            return False
        if not hmac.compare_digest(self._proof(head, [body]), value[_HEAD.size : SEAL_BYTES]):
            return False
        if codec := version >> 8:
            found = _unpacked(body, codec, block_bytes)
            if found is None:
                return False
            body = found
        elif body.nbytes != block_bytes:
            return False
        into.cast("B")[:] = body
        return True

    def _proof(self, head: bytes, body: Sequence[memoryview]) -> bytes:
        if self._key:
            mac = hmac.new(self._key, head, "sha256")
            for piece in body:
                mac.update(piece)
            return mac.digest()
        digest = xxhash.xxh3_64(head)
        for piece in body:
            digest.update(piece)
        return digest.digest().ljust(_PROOF_BYTES, b"\0")


def _unpacked(body: memoryview, codec: int, num_bytes: int) -> memoryview | None:
    """A block of so many bytes; None: it does not stand for one."""
    if codec not in CODECS or num_bytes % codec or body.nbytes <= _SUM.size:
        return None
    try:
        block = unpack(body[_SUM.size :], codec, num_bytes).data
    except Refused:
        return None
    return block if _SUM.unpack_from(body)[0] == checksum(block) else None
