"""The one block hash of Tandem.

A block's hash is chained and seed-free: it depends on the tokens of the block, its parent's hash and a root that names
everything else that decides the KV bytes. Gateway, router, engine and every tier call this module, so equal hashes mean
equal KV on every machine. SHA-256 cut to 16 bytes: 64 bits of work to find any collision, and a tenant's salt keeps the
search inside one tenant.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 16
_FORMAT = b"tandem-kv-1"


def root_hash(
    *, fingerprint: str, layout: str, block_size: int, salt: str = "", lora: str = "", multimodal: str = ""
) -> bytes:
    """Parent of a sequence's first block. Fields are length-prefixed in fixed order, so none can pass for another."""
    digest = hashlib.sha256(_FORMAT)
    for field in (fingerprint, layout, str(block_size), salt, lora, multimodal):
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()[:HASH_BYTES]


def block_hashes(token_ids: Sequence[int], block_size: int, parent: bytes) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order. `parent` is the root, or the hash of the block before."""
    full = len(token_ids) // block_size
    data = np.asarray(token_ids[: full * block_size], dtype="<u4").tobytes()
    step = 4 * block_size
    hashes = []
    for start in range(0, full * step, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes


def test_vector() -> bytes:
    """Hash of a fixed sequence. Two processes that agree on it hash alike; a worker shows it when it registers."""
    root = root_hash(fingerprint="f", layout="l", block_size=4, salt="s", lora="a", multimodal="m")
    return block_hashes(list(range(1, 13)), 4, root)[-1]
