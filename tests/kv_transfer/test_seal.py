"""Blocks under a seal, packed and not: every bit comes back, and nothing else is taken for a block."""

import random
import struct

import numpy as np
import pytest

from kv_transfer.connectors import codec as codecs
from kv_transfer.tiers.seal import SEAL_BYTES, Seal
from kv_transfer.tiers.store import BlockFormat, checksum

WORDS = 4096
HASH = bytes(range(16))


def kv(codec: int, seed: int = 1) -> memoryview:
    """Numbers as KV has them: the top bytes say little."""
    values = np.random.default_rng(seed).normal(size=WORDS).astype("<f4")
    top = values.view("<u4") >> np.uint32(8 * (4 - codec))
    return memoryview(bytearray(top.astype(f"<u{codec}").tobytes()))


def seal(codec: int, key: bytes = b"secret", packs: bool = True) -> Seal:
    return Seal(BlockFormat("model", f"words of {codec}", WORDS * codec), key, codec if packs else 0)


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("key", [b"secret", b""])
def test_every_bit_comes_back(codec: int, key: bytes) -> None:
    block = kv(codec)
    packed, plain = (seal(codec, key, packs).close(HASH, block) for packs in (True, False))
    assert len(packed) < len(plain) == SEAL_BYTES + block.nbytes
    for value in (packed, plain):
        for packs in (True, False):  # whoever reads it
            into = memoryview(bytearray(block.nbytes))
            assert seal(codec, key, packs).open(HASH, memoryview(value), into) and into == block


def test_noise_is_not_packed() -> None:
    block = memoryview(bytearray(random.Random(1).randbytes(2 * WORDS)))
    value, into = seal(2).close(HASH, block), memoryview(bytearray(2 * WORDS))
    assert len(value) == SEAL_BYTES + block.nbytes and seal(2).open(HASH, memoryview(value), into) and into == block


def test_damage_opens_nothing() -> None:
    """Neither with the key nor without, where who writes there can make up the proof."""
    block, dice = kv(2), random.Random(2)
    for key in (b"secret", b""):
        value = seal(2, key).close(HASH, block)
        assert not seal(2, key).open(HASH[::-1], memoryview(value), memoryview(bytearray(block.nbytes)))
        for _ in range(300):
            at = dice.choice((dice.randrange(SEAL_BYTES + 8), dice.randrange(len(value))))
            damaged = bytearray(value)
            damaged[at] ^= 1 << dice.randrange(8)
            for wrong in (bytes(damaged), value[:at], value + b"x" * dice.randint(1, 9)):
                assert not seal(2, key).open(HASH, memoryview(wrong), memoryview(bytearray(block.nbytes)))


def made_up(body: bytes, version: int, codec: int = 2) -> memoryview:
    """A value with a proof that holds where there is no key."""
    forger = seal(codec, b"")
    head = struct.pack("<4sI16s16s", b"TNDM", version, forger._format.digest, HASH)
    return memoryview(head + forger._proof(head, [memoryview(body)]) + body)


def test_values_that_others_make_up_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key they can: a bomb, another codec, the packed form of another block, too little."""
    block, into = kv(2), memoryview(bytearray(2 * WORDS))
    packed = b"".join(codecs.pack(np.frombuffer(block, np.uint8), 2))
    right = struct.pack("<Q", checksum(block))
    assert seal(2, b"").open(HASH, made_up(right + packed, 1 | 2 << 8), into) and into == block
    bomb = codecs.zstd.compress(bytes(1 << 26), 1)
    limits: list[int] = []
    inflate = codecs._inflate

    def watched(head: memoryview, num_bytes: int) -> bytes:
        limits.append(num_bytes)
        return inflate(head, num_bytes)

    monkeypatch.setattr(codecs, "_inflate", watched)
    assert len(bomb) + WORDS < block.nbytes
    for body, version in (
        (right + bomb + bytes(WORDS), 1 | 2 << 8),
        (right + packed, 1 | 3 << 8),
        (right + packed, 1 | 1 << 8),
        (right + packed, 1 | 4 << 8),
        (right + packed, 2 | 2 << 8),
        (bytes(8) + packed, 1 | 2 << 8),
        (right, 1 | 2 << 8),
        (b"x", 1 | 2 << 8),
        (bytes(block)[:-1], 1),
    ):
        assert not seal(2, b"").open(HASH, made_up(body, version), memoryview(bytearray(2 * WORDS))), (body, version)
    assert limits and max(limits) <= 2 * WORDS
