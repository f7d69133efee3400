"""A walk over a GGUF header that trusts nothing: every count, length and offset is held against the file's size.

It runs before any library allocates by these numbers (format: the GGUF specification of ggml, version 2 and 3).
"""

import mmap
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

from engine.config import ModelError

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_SMALLEST_STRING = 8  # its length field


class _Cursor:
    """Reads little-endian numbers and skips bytes, never beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.offset = 0

    def number(self, what: str, code: str = "<Q") -> int:
        size = struct.calcsize(code)
        self.skip(size, what)
        return int(struct.unpack_from(code, self._data, self.offset - size)[0])

    def skip(self, count: int, what: str) -> None:
        if count > len(self._data) - self.offset:
            raise ModelError(f"{self._path}: {what} reaches beyond the end of the file; it is cut off or damaged")
        self.offset += count

    def string(self, what: str) -> bytes:
        length = self.number(what)
        self.skip(length, what)
        return self._data[self.offset - length : self.offset]


def check_header(path: Path, type_sizes: Callable[[int], tuple[int, int, str]]) -> None:
    """Raises ModelError unless all of `path`'s header and tensors lie inside the file.

    `type_sizes(number)` gives (elements per quantisation block, bytes per block, name), KeyError for an unknown type.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise ModelError(f"{path}: too short for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(path, data, type_sizes)


def _check(path: Path, data: mmap.mmap, type_sizes: Callable[[int], tuple[int, int, str]]) -> None:
    cursor = _Cursor(path, data)
    magic = cursor.number("magic", "<I")
    version = cursor.number("version", "<I")
    if magic != int.from_bytes(b"GGUF", "little") or version not in (2, 3):
        raise ModelError(f"{path}: not a GGUF file of version 2 or 3")
    num_tensors, num_keys = cursor.number("tensor count"), cursor.number("key count")
    # The smallest tensor entry takes 24 bytes, the smallest key 13: more than fit cannot be meant.
    if num_tensors * 24 + num_keys * 13 > len(data):
        raise ModelError(f"{path}: {num_tensors} tensors and {num_keys} keys do not fit into the file")
    alignment = 32
    for _ in range(num_keys):
        key = cursor.string("a key")
        kind = cursor.number(f"the type of {key!r}", "<I")
        if key == b"general.alignment" and kind == 4:
            alignment = cursor.number("alignment", "<I")
            if alignment < 1 or alignment > 1 << 20:
                raise ModelError(f"{path}: alignment {alignment} makes no sense")
            continue
        if key == b"split.count" and kind in _SCALAR_BYTES and cursor.number("split.count", "<H") > 1:
            raise ModelError(f"{path}: split GGUF files are not supported; join them with `gguf-split --merge`")
        if key != b"split.count":
            _skip_value(cursor, kind, key, path)
    ends = []
    for _ in range(num_tensors):
        name = cursor.string("a tensor name").decode(errors="replace")
        num_dims = cursor.number(f"dimensions of {name}", "<I")
        if num_dims > 4:
            raise ModelError(f"{path}: tensor {name} has {num_dims} dimensions")
        elements = prod(cursor.number(f"shape of {name}") for _ in range(num_dims))
        kind = cursor.number(f"type of {name}", "<I")
        offset = cursor.number(f"offset of {name}")
        try:
            block, size, type_name = type_sizes(kind)
        except KeyError:
            raise ModelError(f"{path}: tensor {name} has the unknown type {kind}") from None
        if elements % block:
            raise ModelError(f"{path}: tensor {name} does not fill blocks of {type_name}")
        ends.append((offset + elements // block * size, name))
    start = -(-cursor.offset // alignment) * alignment
    for end, name in ends:
        if start + end > len(data):
            raise ModelError(f"{path}: tensor {name} reaches beyond the end of the file; it is cut off or damaged")


def _skip_value(cursor: _Cursor, kind: int, key: bytes, path: Path) -> None:
    what = f"the value of {key.decode(errors='replace')}"
    if kind in _SCALAR_BYTES:
        cursor.skip(_SCALAR_BYTES[kind], what)
    elif kind == _STRING:
        cursor.string(what)
    elif kind == _ARRAY:
        item, count = cursor.number(what, "<I"), cursor.number(what)
        if item in _SCALAR_BYTES:
            cursor.skip(_SCALAR_BYTES[item] * count, what)
        elif item == _STRING:
            before = cursor.offset
            cursor.skip(_SMALLEST_STRING * count, what)  # refuses absurd counts at once
            cursor.offset = before
            for _ in range(count):
                cursor.string(what)
        else:
            raise ModelError(f"{path}: {what} is an array of type {item}")
    else:
        raise ModelError(f"{path}: {what} has the unknown type {kind}")
