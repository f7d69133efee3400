"""Blocks for tests of tiers."""

import hashlib
import random

from kv_transfer.tiers.store import BlockFormat

FORMAT = BlockFormat("model-a", "layers=1,tokens=4", 5000)


def key(number: int) -> bytes:
    """The hash of block `number`."""
    return hashlib.sha256(f"block {number}".encode()).digest()[:16]


def content(number: int, size: int = FORMAT.block_bytes) -> memoryview:
    """Its bytes."""
    return memoryview(bytearray(random.Random(number).randbytes(size)))


def room(count: int, size: int = FORMAT.block_bytes) -> list[memoryview]:
    """Memory for so many blocks, full of something else."""
    return [memoryview(bytearray(b"\xa5" * size)) for _ in range(count)]
