"""Attention on CPU: torch's scaled_dot_product_attention over gathered pages.

A step is cut into *tiles*: a decode is a tile of one query token, a prompt chunk is cut into tiles of `TILE` tokens,
each of which sees only the context up to its own end. Tiles of similar query length form a *family*, whose queries are
laid out together; tiles of a family with similar context form a *part*, which gathers its pages and attends in one
call per layer, and is small enough for what it gathered to be still in the core's cache. The query heads that share a
KV head become query rows, so KV is never repeated.

What makes a row independent, bit for bit, of its neighbours, of padding and of how a prompt was cut into chunks
(float32, measured on AMD for AVX2 and AVX-512 with head sizes 16 to 256, and tested):

- torch walks the keys in windows of 512. Masked keys add exact zeros, so more padding changes nothing as long as the
  matrix product sums a window in the same pieces. MKL cuts a window of up to 192 keys not at all, one of 384 or more at
  multiples of 192, and one between in halves; `padded_context` avoids those between.
- a product with fewer than four rows takes another path, so query rows come in multiples of four.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.attention.base import AttentionBackend, AttentionContext, LayerKind, Span
from engine.attention.cache_rows import cache_rows
from engine.kv_cache import KVCache

TILE = 128  # query tokens
_WINDOW = 512  # keys that torch's kernel takes at once
_BUCKETS = np.array([32, 64, 96, 128, 192, 384, 448, _WINDOW])  # contexts within a window that are worth a group
_PART_VALUES = 1 << 19  # gathered cache values of a part and thread, unless a tile needs more: 2 MiB of float32

IntArray = npt.NDArray[np.int64]


def padded_context(length: IntArray) -> IntArray:
    """Number of keys to compute for a context of `length`: the next multiple of 16 that no result can depend on."""
    inside = (length - 1) % _WINDOW + 1
    padded = (inside + 15) // 16 * 16
    return length - inside + np.where((padded > 192) & (padded < 384), 384, padded)


class _Tiles(NamedTuple):
    """Arrays [T], one entry a tile."""

    span: IntArray  # which block table row
    first: IntArray  # index in the step of the first query token
    length: IntArray  # query tokens
    context: IntArray  # keys that the last query token sees


class _Part(NamedTuple):
    """n tiles of a family that attend in one call, with S keys each after padding."""

    pages: torch.Tensor  # int64 [num_layers, n * P]: rows of the cache seen as [num_blocks * num_layers, page values]
    mask: torch.Tensor  # [n, 1, query rows or 1, S]: 0 or -inf
    num_keys: int  # S


class _Family(NamedTuple):
    """n tiles of T query tokens each after padding, in the order of their parts."""

    parts: list[_Part]
    num_queries: int  # T
    tokens: torch.Tensor | None  # int64 [n * T]: query tokens; None: all tokens of the step in order
    kept: torch.Tensor | None  # int64: which of the n * T are not padding; None: all
    targets: torch.Tensor | None  # int64: tokens[kept]


class SdpaBackend(AttentionBackend):
    """Full causal attention in `dtype`, that of queries, keys and values; None: the cache's."""

    def __init__(self, cache: KVCache, kind: LayerKind, dtype: torch.dtype | None = None) -> None:
        if kind.sliding_window is not None or kind.logit_softcap is not None:
            raise ValueError("the CPU attention backend offers neither sliding windows nor logit soft-caps")
        if kind.num_heads % cache.spec.num_kv_heads:
            raise ValueError(f"{kind.num_heads} query heads cannot share {cache.spec.num_kv_heads} KV heads evenly")
        self.cache = cache
        self.kind = kind
        self.rows = cache_rows(cache, dtype or cache.spec.dtype)
        self._scratch = torch.empty(0, dtype=dtype or cache.spec.dtype)

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies pages together, int64 [n]: see `CacheRows`.

        The result [n, values of a page] lies in memory that is used again by the next call: fresh memory would cost as
        much in page faults as the copy itself.
        """
        size = len(pages) * self.rows.page_values
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(size)
        gathered = self._scratch[:size].view(len(pages), -1)
        self.rows.gather(pages, gathered)
        return gathered

    def plan(self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None) -> "SdpaContext":
        """Prepares the index tensors and masks of one step."""
        spec = self.cache.spec
        starts = np.array([span.start for span in spans])
        lengths = np.array([span.length for span in spans])
        ends = starts + lengths
        firsts = np.cumsum(lengths) - lengths
        used = [span.block_ids[: -(-(span.start + span.length) // spec.block_size)] for span in spans]
        table = _block_table(used, int(padded_context(ends).max()), spec.block_size)

        owner = np.repeat(np.arange(len(spans)), lengths)
        positions = np.arange(len(owner)) - firsts[owner] + starts[owner]
        blocks = table[owner, positions // spec.block_size]
        slots = blocks * (spec.num_layers * spec.block_size) + positions % spec.block_size

        # Masked keys weigh zero, but zero times the NaN of an earlier owner would be NaN: pages begin clean.
        last = (ends - 1) // spec.block_size
        begun = np.flatnonzero((last * spec.block_size >= starts) & (ends % spec.block_size != 0))
        begun_pages = table[begun, last[begun]] * spec.num_layers

        tiles = _cut(starts, lengths, firsts)
        query = np.ceil(np.log2(tiles.length)).astype(np.int64)
        families = [self._family(tiles, np.flatnonzero(query == q), table, len(owner)) for q in np.unique(query)]
        return SdpaContext(self, torch.from_numpy(slots), torch.from_numpy(begun_pages), families, on_layer)

    def _family(self, tiles: _Tiles, members: IntArray, table: IntArray, num_tokens: int) -> _Family:
        """The family of the tiles `members`, for a step of `num_tokens`."""
        inside = (tiles.context[members] - 1) % _WINDOW + 1
        bucket = tiles.context[members] - inside + _BUCKETS[np.searchsorted(_BUCKETS, inside)]
        members = members[np.argsort(bucket, kind="stable")]
        bucket.sort()
        lengths = tiles.length[members]
        query = int(lengths.max())
        offsets = np.arange(query)
        tokens = (tiles.first[members, None] + np.minimum(offsets, lengths[:, None] - 1)).reshape(-1)
        kept = np.flatnonzero(offsets < lengths[:, None])
        in_order = len(kept) == len(tokens) == num_tokens and bool((tokens == np.arange(num_tokens)).all())

        values = 2 * self.cache.spec.num_kv_heads * self.cache.spec.head_dim
        parts = []
        for keys in np.unique(bucket):
            similar = members[bucket == keys]
            most = max(1, _PART_VALUES * torch.get_num_threads() // (int(keys) * values))
            parts += [self._part(tiles, similar[i : i + most], table, query) for i in range(0, len(similar), most)]
        return _Family(
            parts=parts,
            num_queries=query,
            tokens=None if in_order else torch.from_numpy(tokens),
            kept=None if len(kept) == len(tokens) else torch.from_numpy(kept),
            targets=None if in_order else torch.from_numpy(tokens[kept]),
        )

    def _part(self, tiles: _Tiles, members: IntArray, table: IntArray, query: int) -> _Part:
        """A part of a family whose tiles have `query` query tokens after padding."""
        spec = self.cache.spec
        lengths, contexts = tiles.length[members, None], tiles.context[members, None]
        keys = int(padded_context(contexts).max())
        pages = table[tiles.span[members], : -(-keys // spec.block_size)].reshape(-1) * spec.num_layers
        visible = contexts - np.maximum(lengths - 1 - np.arange(query), 0)  # [n, query]
        if query > 1:  # one entry a query row: the token's, for each head of the group; padding sees what the last sees
            visible = np.repeat(visible, self.kind.num_heads // spec.num_kv_heads, axis=1)
            visible = np.pad(visible, ((0, 0), (0, -visible.shape[1] % 4)), mode="edge")
        mask = np.where(np.arange(keys) < visible[:, None, :, None], np.float32(0), np.float32(-np.inf))
        return _Part(torch.from_numpy(pages + np.arange(spec.num_layers)[:, None]), torch.from_numpy(mask), keys)


class SdpaContext(AttentionContext):
    """One step over the pages of an `SdpaBackend`."""

    def __init__(
        self,
        backend: SdpaBackend,
        slots: torch.Tensor,
        begun_pages: torch.Tensor,
        families: list[_Family],
        on_layer: Callable[[int], None] | None,
    ) -> None:
        spec = backend.cache.spec
        self._backend = backend
        self._spec = spec
        self._scale = backend.kind.scale
        self._on_layer = on_layer
        self._slots = slots  # [N]: rows of tokens in layer 0
        self._begun_pages = begun_pages  # of layer 0: pages that this step fills in part
        self._families = families

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionContext.forward`."""
        if len(self._begun_pages):
            self._backend.rows.clear(self._begun_pages + layer)
        values = torch.cat((k, v), dim=-1).view(len(k), -1)
        self._backend.rows.write(self._slots + layer * self._spec.block_size, values)
        if self._on_layer is not None:
            self._on_layer(layer)
        if self._families[0].tokens is None:
            return self._attend(self._families[0], layer, q)
        out = torch.empty_like(q)
        for family in self._families:
            result = self._attend(family, layer, q)
            if family.kept is not None:
                result = result.index_select(0, family.kept)
            assert family.targets is not None
            out.index_copy_(0, family.targets, result)
        return out

    def _attend(self, family: _Family, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Queries of the step [N, heads, D] -> the family's results [n * T, heads, D]."""
        heads, dim = q.shape[1:]
        kv_heads, query = self._spec.num_kv_heads, family.num_queries
        if family.tokens is not None:
            q = q.index_select(0, family.tokens)
        rows = q.view(-1, query, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        rows = rows.reshape(len(rows), kv_heads, -1, dim)
        num_rows = rows.shape[2]
        if num_rows % 4:
            rows = pad(rows, (0, 0, 0, -num_rows % 4))
        results = []
        start = 0
        for part in family.parts:
            n = len(part.mask)
            kv = self._backend.gather(part.pages[layer])
            kv = kv.view(n, -1, kv_heads, 2 * dim)[:, : part.num_keys].transpose(1, 2)
            some, mask = rows[start : start + n], part.mask.to(q.dtype)
            results.append(
                scaled_dot_product_attention(some, kv[..., :dim], kv[..., dim:], attn_mask=mask, scale=self._scale)
            )
            start += n
        out = results[0] if len(results) == 1 else torch.cat(results)
        out = out[:, :, :num_rows].reshape(-1, kv_heads, query, heads // kv_heads, dim)
        return out.transpose(1, 2).reshape(-1, heads, dim)


def _block_table(block_ids: list[Sequence[int]], num_keys: int, block_size: int) -> IntArray:
    """[n, P] with room for `num_keys`; what a sequence lacks is filled with its own first block (and masked)."""
    counts = np.array([len(ids) for ids in block_ids])
    width = -(-num_keys // block_size)
    table = np.repeat(np.array([ids[0] for ids in block_ids])[:, None], width, axis=1)
    table[np.arange(width) < counts[:, None]] = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in block_ids])
    return table


def _cut(starts: IntArray, lengths: IntArray, firsts: IntArray) -> _Tiles:
    """Cuts spans [n] into tiles of at most TILE tokens."""
    counts = -(-lengths // TILE)
    span = np.repeat(np.arange(len(starts)), counts)
    offset = (np.arange(len(span)) - (np.cumsum(counts) - counts)[span]) * TILE
    length = np.minimum(lengths[span] - offset, TILE)
    return _Tiles(span, firsts[span] + offset, length, starts[span] + offset + length)
