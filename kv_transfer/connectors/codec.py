"""A codec for KV bytes on links that are slower than it. Lossless: every bit comes back.

The top byte of a float, its sign and most of its exponent, holds about three bits of information in KV; the other bytes
hold eight each, and time spent on them is lost. So the words of a payload are cut into planes, a byte of each word to a
plane: the top plane goes through zstd, level 1, the others travel as they are, behind it. Words of `n` bytes are the
codec `n`.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kv_transfer.connectors.frames import Refused

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ModuleNotFoundError:  # a Python without it, or an installation: its peers send plain bytes
    CODECS: tuple[int, ...] = ()
else:
    CODECS = (1, 2, 4)  # what can be packed and unpacked here

Bytes = npt.NDArray[np.uint8]
_LEVEL = 1  # higher ones take longer and pack these planes no better
_SMALLEST_WINDOW_LOG = 10  # of zstd


def pack(payload: Bytes, codec: int) -> list[memoryview]:
    """What is to be sent for a `payload` [bytes], which is whole words, in pieces."""
    words = payload.view(f"<u{codec}")
    planes = [(words >> 8 * place).astype(np.uint8).data for place in range(codec)]
    return [memoryview(zstd.compress(planes.pop(), _LEVEL)), *planes]


def unpack(packed: memoryview, codec: int, num_bytes: int) -> Bytes:
    """The payload [num_bytes], whole words. Raises Refused if `packed` stands for anything else.

    Whatever `packed` is, no more memory is taken than twice the payload's and what zstd needs for its own state.
    """
    num_words = num_bytes // codec
    plain = num_bytes - num_words
    if len(packed) <= plain:
        raise Refused("codec", f"{len(packed)} bytes cannot stand for {num_bytes}")
    head, rest = packed[: len(packed) - plain], np.frombuffer(packed, np.uint8)[len(packed) - plain :]
    words = np.frombuffer(_inflate(head, num_words), np.uint8).astype(f"<u{codec}")
    for place in reversed(range(codec - 1)):
        words <<= 8
        words |= rest[place * num_words : (place + 1) * num_words]
    return words.view(np.uint8)


def _inflate(packed: memoryview, num_bytes: int) -> bytes:
    """Exactly so many bytes. Raises Refused for fewer or more, of which one is made at most."""
    window = max(_SMALLEST_WINDOW_LOG, (num_bytes - 1).bit_length())
    inflating = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window})
    try:
        plane = inflating.decompress(packed, max_length=num_bytes + 1)
    except zstd.ZstdError as error:
        raise Refused("codec", f"the payload cannot be unpacked: {error}") from error
    if len(plane) != num_bytes or not inflating.eof or inflating.unused_data:
        raise Refused("codec", f"the payload does not stand for the {num_bytes} words of its blocks")
    return plane
