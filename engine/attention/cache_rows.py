"""Rows of a paged KV cache on CPU, as attention in another type than the cache's reads and writes them."""

import torch

from engine.kv_cache import KVCache

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class CacheRows:
    """The cache as rows of tokens [num_blocks * num_layers * block_size, .] and of pages [num_blocks * num_layers, .].

    A row of a token holds K and V of all heads. Indices are int64.
    """

    def __init__(self, cache: KVCache) -> None:
        spec = cache.spec
        stored = self._stored(cache.tensor)
        self._by_token = stored.view(-1, spec.num_kv_heads * 2 * spec.head_dim)
        self._by_page = stored.view(cache.num_blocks * spec.num_layers, -1)
        self.page_values = self._by_page.shape[1]

    def clear(self, pages: torch.Tensor) -> None:
        """Fills pages [n] with zeros."""
        self._by_page.index_fill_(0, pages, 0)

    def write(self, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Stores values [n, .] in the rows of tokens [n]."""
        self._by_token.index_copy_(0, tokens, values)

    def gather(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages [n] into `out` [n, page_values]."""
        torch.index_select(self._by_page, 0, pages, out=out)

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Fp8CacheRows(CacheRows):
    """Of a cache of float8_e4m3fn, which torch on CPU can do little with: rows are bytes here."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        """`dtype`: of values and of what is gathered."""
        super().__init__(cache)
        self._numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)  # of each byte

    def write(self, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Rounds to the nearest; what is too large becomes the largest."""
        rounded = values.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        super().write(tokens, rounded.view(torch.uint8))

    def gather(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """See `CacheRows.gather`. A table is several times faster than torch's conversion."""
        stored = self._by_page.index_select(0, pages).view(-1)
        torch.index_select(self._numbers, 0, stored.int(), out=out.view(-1))

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)


def cache_rows(cache: KVCache, dtype: torch.dtype) -> CacheRows:
    """Rows for attention in `dtype`. Raises ValueError unless the cache has it too, or FP8."""
    if cache.spec.dtype == torch.float8_e4m3fn:
        return Fp8CacheRows(cache, dtype)
    if cache.spec.dtype != dtype:
        raise ValueError(f"attention in {dtype} cannot use a cache of {cache.spec.dtype}")
    return CacheRows(cache)
