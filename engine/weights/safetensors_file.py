"""The header of a safetensors file: which tensors it holds and where. Nothing in it is trusted."""

import json
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import ModelError

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100 << 20  # bytes


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor that lies in a file, row after row."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


def stored_tensors(path: Path) -> list[StoredTensor]:
    """All tensors of a file in the order in which they lie. Raises ModelError unless they fill it exactly."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise _damaged(path, f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length), object_pairs_hook=_without_repetition)
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        header.pop("__metadata__", None)
        places = sorted((_place(entry), name) for name, entry in header.items())
        tensors = [_tensor(path, name, header[name], 8 + length + start) for (start, _), name in places]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise _damaged(path, repr(error) if isinstance(error, KeyError) else str(error)) from error
    end = 8 + length
    for tensor, ((start, stop), name) in zip(tensors, places, strict=True):
        if tensor.offset != end or stop - start != tensor.size:
            raise _damaged(path, f"tensor {name} does not lie where its neighbours leave room for it")
        end += tensor.size
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end}, the file has {size}")
    return tensors


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is damaged or cut off: {reason}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name comes twice in the header")
    return names


def _place(entry: Any) -> tuple[int, int]:
    """Start and end of a tensor behind the header."""
    start, end = entry["data_offsets"]
    if type(start) is not int or type(end) is not int:
        raise ValueError(f"offsets {entry['data_offsets']!r}")
    return start, end


def _tensor(path: Path, name: str, entry: Any, offset: int) -> StoredTensor:
    if entry["dtype"] not in _TYPES:
        raise ModelError(f"{path}: tensor {name} has the unknown type {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name} has the shape {entry['shape']!r}")
    return StoredTensor(path, name, _TYPES[entry["dtype"]], shape, offset)
