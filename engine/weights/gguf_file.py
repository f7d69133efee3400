"""Reads GGUF (versions 2 and 3, little-endian) and trusts nothing in it.

Every count, length and offset is held against the file's size before anything is allocated by it. The `gguf` library
gives the sizes of the quantisation types; tensors are mapped, not read.
"""

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from engine.config import ModelError

_CODES = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFTensor(msgspec.Struct, frozen=True):
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GGUFFile(msgspec.Struct, frozen=True):
    """Keys and tensors of a file."""

    path: Path
    fields: dict[str, Any]  # strings, numbers, lists of strings, arrays of numbers
    tensors: list[GGUFTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, or `default`. Raises ModelError for a value of another kind."""
        value = self.fields.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise ModelError(f"{self.path}: the key {key} has a value of the wrong type: {type(value).__name__}")
        return value

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor, mapped, [rows, bytes per row]; a vector has one element per row."""
        data = np.memmap(self.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.size,))
        return data.reshape(tensor.shape[0], -1)


class _Cursor:
    """Reads values one after the other, never beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def bytes(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.offset:
            raise ModelError(f"{self.path}: {what} reaches beyond the end of the file; it is cut off or damaged")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.bytes(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        try:
            return self.bytes(self.scalar("<Q", what), what).decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _CODES:
            return self.scalar(_CODES[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: {what} has the unknown type {kind}")
        item, count = self.scalar("<I", what), self.scalar("<Q", what)
        if item in _CODES:
            code = _CODES[item]
            return np.frombuffer(self.bytes(struct.calcsize(code) * count, what), dtype=code)
        if item != _STRING:
            raise ModelError(f"{self.path}: {what} is an array of type {item}, not supported")
        if count * 8 > len(self.data) - self.offset:  # each string takes 8 bytes at least
            raise ModelError(f"{self.path}: {what} reaches beyond the end of the file; it is cut off or damaged")
        return [self.string(what) for _ in range(count)]


def read_gguf(path: Path) -> GGUFFile:
    """Keys and tensor places of `path`. Raises ModelError unless all of it lies inside the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(path, data))
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read(cursor: _Cursor) -> GGUFFile:
    path = cursor.path
    if cursor.bytes(4, "magic number") != b"GGUF" or cursor.scalar("<I", "version") not in (2, 3):
        raise ModelError(f"{path}: not a GGUF file of version 2 or 3")
    num_tensors, num_keys = cursor.scalar("<Q", "tensor count"), cursor.scalar("<Q", "key count")
    # The smallest tensor entry takes 24 bytes, the smallest key 13: more than fit cannot be meant.
    if num_tensors * 24 + num_keys * 13 > len(cursor.data):
        raise ModelError(f"{path}: {num_tensors} tensors and {num_keys} keys do not fit into the file; it is damaged")
    fields: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a key")
        fields[key] = cursor.value(cursor.scalar("<I", f"the type of {key}"), f"the value of {key}")
    split = fields.get("split.count")
    if isinstance(split, int) and split > 1:
        raise ModelError(f"{path} is one of several split files: join them with `llama-gguf-split --merge`")
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ModelError(f"{path}: alignment {alignment!r} makes no sense")
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.offset // alignment) * alignment
    tensors = [msgspec.structs.replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    for tensor in tensors:
        if tensor.offset + tensor.size > len(cursor.data):
            raise ModelError(
                f"{path}: tensor {tensor.name} reaches beyond the end of the file; it is cut off or damaged"
            )
    if len({tensor.name for tensor in tensors}) < num_tensors:
        raise ModelError(f"{path}: a tensor comes twice")
    return GGUFFile(path, fields, tensors)


def _tensor(cursor: _Cursor) -> GGUFTensor:
    """One entry of the tensor table; its offset counts from the end of the table."""
    name = cursor.string("a tensor's name")
    num_dims = cursor.scalar("<I", f"dimensions of {name}")
    if not 1 <= num_dims <= 2:
        raise ModelError(f"{cursor.path}: tensor {name} has {num_dims} dimensions; vectors and matrices are supported")
    shape = tuple(reversed([cursor.scalar("<Q", f"shape of {name}") for _ in range(num_dims)]))
    number, offset = cursor.scalar("<I", f"type of {name}"), cursor.scalar("<Q", f"offset of {name}")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(f"{cursor.path}: tensor {name} has the unknown type {number}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block or (num_dims == 1 and block > 1):
        raise ModelError(f"{cursor.path}: tensor {name} of shape {list(shape)} does not fill blocks of {kind.name}")
    return GGUFTensor(name, shape, kind, offset, prod(shape) // block * block_bytes)
