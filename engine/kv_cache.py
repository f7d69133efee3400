"""The memory of the paged KV cache: where the keys and values of one block lie, and in how many bytes.

One tensor holds everything. One block is one contiguous range of it, and so is one layer of one block, so that a block
can be moved to another worker without packing. Who owns which block is the business of `engine.block_pool`.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import ModelConfig


class KVCacheError(ValueError):
    """The memory given for a KV cache does not fit it."""


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
)}  # fmt: skip
_LAYOUT = re.compile(
    r"layers=(?P<layers>\d{1,5}),tokens=(?P<tokens>\d{1,5}),kv_heads=(?P<heads>\d{1,5})"
    rf",k\|v=(?P<dim>\d{{1,5}})\+(?P=dim),(?P<dtype>{'|'.join(_DTYPES)})"
    r"(?:,ranks=(?P<ranks>\d{1,3}))?(?:,scales=(?P<scales>-?\d{1,3}:-?\d{1,3}(?:/-?\d{1,3}:-?\d{1,3})*))?"
)


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of one cache group: layers that keep the same number of heads for the same tokens.

    Of a worker with several `ranks` it is the share of one; each has as many heads. `scales` are exponents of two, of
    keys and values of each layer: what the model's keys and values are divided by in the cache; empty: all are 0.
    """

    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    ranks: int = 1
    scales: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        ranks: int = 1,
        scales: tuple[tuple[int, int], ...] = (),
    ) -> "KVCacheSpec":
        """For a model, or for the share of it that one rank has."""
        return cls(model.num_layers, block_size, model.num_kv_heads, model.head_dim, dtype, ranks, scales)

    @classmethod
    def parse(cls, layout: str) -> "KVCacheSpec":
        """The spec that `layout` names. Raises KVCacheError for what names none."""
        found = _LAYOUT.fullmatch(layout)
        if found is None:
            raise KVCacheError(f"{layout[:200]!r} is no layout of KV blocks")
        layers, tokens, heads, dim, ranks = (
            int(found[name] or 1) for name in ("layers", "tokens", "heads", "dim", "ranks")
        )
        pairs = (pair.split(":") for pair in (found["scales"] or "").split("/") if pair)
        scales = tuple((int(key), int(value)) for key, value in pairs)
        if not min(layers, tokens, heads, dim, ranks) or (scales and len(scales) != layers):
            raise KVCacheError(f"{layout[:200]!r} is no layout of KV blocks")
        return cls(layers, tokens, heads, dim, _DTYPES[found["dtype"]], ranks, scales)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_size * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def layout(self) -> str:
        """Names everything that decides the bytes of a block: workers with equal layouts can exchange blocks."""
        dtype = str(self.dtype).removeprefix("torch.")
        ranks = f",ranks={self.ranks}" if self.ranks > 1 else ""
        scales = ",scales=" + "/".join(f"{key}:{value}" for key, value in self.scales) if self.scales else ""
        return (
            f"layers={self.num_layers},tokens={self.block_size},kv_heads={self.num_kv_heads}"
            f",k|v={self.head_dim}+{self.head_dim},{dtype}{ranks}{scales}"
        )


class KVCache:
    """`tensor` [num_blocks, num_layers, block_size, num_kv_heads, 2 * head_dim]: K, then V in the last dimension.

    `buffer` is writable memory of at least `num_blocks * spec.block_bytes` bytes, such as an mmap of shared memory;
    without one the cache allocates its own on `device`. It is filled with zeros, which also makes every page resident.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, buffer: Any = None, device: str = "cpu") -> None:
        size = num_blocks * spec.block_bytes
        if num_blocks < 1:
            raise KVCacheError(f"a KV cache needs at least one block, not {num_blocks}: give it more memory")
        if buffer is None:
            data = torch.zeros(size, dtype=torch.uint8, device=device)
        else:
            with memoryview(buffer) as view:
                if view.readonly or view.nbytes < size:
                    raise KVCacheError(
                        f"the buffer for {num_blocks} KV blocks must be writable and hold {size} bytes; "
                        f"it holds {view.nbytes}{' and is read-only' if view.readonly else ''}"
                    )
            data = torch.frombuffer(buffer, dtype=torch.uint8, count=size).zero_()
        self.spec = spec
        self.num_blocks = num_blocks
        self._bytes = data.numpy().data if data.device.type == "cpu" else None
        self.tensor = data.view(spec.dtype).view(self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        spec = self.spec
        return self.num_blocks, spec.num_layers, spec.block_size, spec.num_kv_heads, 2 * spec.head_dim

    def release(self) -> None:
        """Gives the memory on a device back; `tensor` is empty until `restore`."""
        self.tensor = self.tensor.new_empty(0)

    def restore(self) -> None:
        """Takes memory on the device again, full of zeros."""
        size = self.num_blocks * self.spec.block_bytes
        data = torch.zeros(size, dtype=torch.uint8, device=self.tensor.device)
        self.tensor = data.view(self.spec.dtype).view(self._shape)

    def layer(self, layer: int) -> torch.Tensor:
        """View [num_blocks, block_size, num_kv_heads, 2 * head_dim] of one layer."""
        return self.tensor[:, layer]

    def block_bytes_view(self, block_id: int) -> memoryview:
        """The contiguous bytes of one block, readable and writable in place. Layer `l` starts at `l * layer_bytes`."""
        if not 0 <= block_id < self.num_blocks:
            raise KVCacheError(f"block {block_id} is not among the {self.num_blocks} blocks of this cache")
        if self._bytes is None:
            raise KVCacheError(f"the bytes of a block on {self.tensor.device} cannot be viewed by the CPU")
        start = block_id * self.spec.block_bytes
        return self._bytes[start : start + self.spec.block_bytes]
