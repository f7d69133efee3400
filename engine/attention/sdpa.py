"""Attention on CPU: torch's scaled_dot_product_attention over gathered pages.

A step is cut into *tiles*: a decode is a tile of one query token, a prompt chunk is cut into tiles of `TILE` tokens,
each of which sees only the context up to its own end. Tiles of similar query length form a *family*, whose queries are
laid out together; tiles of a family with similar context form a *part*, which gathers its pages and attends in one
call per layer, and is small enough for what it gathered to be still in the core's cache. The query heads that share a
KV head become query rows, so KV is never repeated.

What makes a row independent, bit for bit, of its neighbours, of padding and of how a prompt was cut into chunks
(float32, measured with head sizes 16 to 256 on AMD for AVX2 and AVX-512 and on Intel for AVX-512, and tested):

- torch walks the keys in windows of 512. Masked keys add exact zeros, so more padding changes nothing as long as the
  matrix product sums a window in the same pieces. MKL cuts a window of up to 192 keys not at all; longer ones on AMD in
  halves, or from 384 on at multiples of 192, and on Intel from 385 on in halves. So a window that is longer is whole.
- a product with few rows takes another path: fewer than four, or on Intel up to eight where heads are large. So query
  rows come in multiples of four, or of sixteen.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionBackend, AttentionContext, LayerKind, Span
from engine.attention.cache_rows import cache_rows
from engine.kv_cache import KVCache

TILE = 128  # query tokens
_WINDOW = 512  # keys that torch's kernel takes at once
_UNCUT = 192  # keys of a window that are summed up in one piece on any CPU
_BUCKETS = np.array([32, 64, 96, 128, _UNCUT, _WINDOW])  # contexts within a window that are worth a group
_PART_VALUES = 1 << 19  # gathered cache values of a part and thread, unless a tile needs more: 2 MiB of float32

IntArray = npt.NDArray[np.int64]


def padded_context(length: IntArray) -> IntArray:
    """Number of keys to compute for a context of `length`: the next multiple of 16 that no result can depend on."""
    inside = (length - 1) % _WINDOW + 1
    padded = (inside + 15) // 16 * 16
    return length - inside + np.where(padded > _UNCUT, _WINDOW, padded)


class _Tiles(NamedTuple):
    """Arrays [T], one entry a tile."""

    span: IntArray  # which block table row
    first: IntArray  # index in the step of the first query token
    length: IntArray  # query tokens
    context: IntArray  # keys that the last query token sees


class _Part(NamedTuple):
    """n tiles of a family that attend in one call, with S keys each after padding. All layers use the same memory."""

    pages: Sequence[torch.Tensor]  # of each layer int64 [n * P]: see `CacheRows`
    gathered: torch.Tensor  # [n * P, values of a page]
    keys: torch.Tensor  # [n, kv_heads, S, head_dim], in `gathered`
    values: torch.Tensor  # the same
    mask: torch.Tensor  # [n, 1, query rows or 1, S]: 0 or -inf
    queries: torch.Tensor  # [n, kv_heads, query rows, head_dim], in the family's
    tiles: slice  # where they stand in the family


class _Family(NamedTuple):
    """n tiles of T query tokens each after padding, in the order of their parts."""

    parts: list[_Part]
    queries: torch.Tensor  # [n, kv_heads, T, group, head_dim], in query rows of which those beyond T * group are zero
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
        spec = cache.spec
        self.cache = cache
        self.kind = kind
        self.group = kind.num_heads // spec.num_kv_heads
        self.rows = cache_rows(cache, dtype or spec.dtype)
        self._row_step = 4 if spec.head_dim <= 64 else 16  # query rows come in multiples of it
        self._scratch = torch.empty(0, dtype=dtype or spec.dtype)

    def plan(self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None) -> "SdpaContext":
        """Prepares the index tensors, masks and views of one step."""
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
        return SdpaContext(
            self, self._of_layers(slots, spec.block_size), self._of_layers(begun_pages, 1), families, on_layer
        )

    def _of_layers(self, rows: IntArray, stride: int) -> Sequence[torch.Tensor]:
        """Rows of layer 0 to those of each layer."""
        layers = np.arange(self.cache.spec.num_layers)[:, None]
        return torch.from_numpy(rows + stride * layers).unbind()

    def _family(self, tiles: _Tiles, members: IntArray, table: IntArray, num_tokens: int) -> _Family:
        """The family of the tiles `members`, for a step of `num_tokens`."""
        spec = self.cache.spec
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

        num_rows = query * self.group
        rows = torch.zeros(
            (len(members), spec.num_kv_heads, -(-num_rows // self._row_step) * self._row_step, spec.head_dim),
            dtype=self._scratch.dtype,
        )
        parts = []
        start = 0
        for keys in np.unique(bucket):
            similar = members[bucket == keys]
            most = max(1, _PART_VALUES * torch.get_num_threads() // (int(keys) * 2 * spec.num_kv_heads * spec.head_dim))
            for some in np.array_split(similar, -(-len(similar) // most)):
                where = slice(start, start + len(some))
                parts.append(self._part(tiles, some, table, query, rows[where], where))
                start = where.stop
        return _Family(
            parts=parts,
            queries=rows[:, :, :num_rows].view(*rows.shape[:2], query, self.group, spec.head_dim),
            tokens=None if in_order else torch.from_numpy(tokens),
            kept=None if len(kept) == len(tokens) else torch.from_numpy(kept),
            targets=None if in_order else torch.from_numpy(tokens[kept]),
        )

    def _part(
        self, tiles: _Tiles, members: IntArray, table: IntArray, query: int, queries: torch.Tensor, where: slice
    ) -> _Part:
        """A part of a family whose tiles have `query` query tokens after padding."""
        spec = self.cache.spec
        lengths, contexts = tiles.length[members, None], tiles.context[members, None]
        keys = int(padded_context(contexts).max())
        pages = table[tiles.span[members], : -(-keys // spec.block_size)].reshape(-1) * spec.num_layers
        visible = contexts - np.maximum(lengths - 1 - np.arange(query), 0)  # [n, query]
        if query > 1:  # one entry a query row: the token's, for each head of the group; padding sees what the last sees
            visible = np.repeat(visible, self.group, axis=1)
            visible = np.pad(visible, ((0, 0), (0, -visible.shape[1] % self._row_step)), mode="edge")
        mask = np.where(np.arange(keys) < visible[:, None, :, None], np.float32(0), np.float32(-np.inf))
        gathered = self._scratch_of(len(pages))
        kv = gathered.view(len(members), -1, spec.num_kv_heads, 2 * spec.head_dim)[:, :keys].transpose(1, 2)
        return _Part(
            pages=self._of_layers(pages, 1),
            gathered=gathered,
            keys=kv[..., : spec.head_dim],
            values=kv[..., spec.head_dim :],
            mask=torch.from_numpy(mask).to(queries.dtype),
            queries=queries,
            tiles=where,
        )

    def _scratch_of(self, num_pages: int) -> torch.Tensor:
        """Memory [num_pages, values of a page] that all parts use in turn, so that it stays in the core's cache."""
        size = num_pages * self.rows.page_values
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(size)
        return self._scratch[:size].view(num_pages, -1)


class SdpaContext(AttentionContext):
    """One step over the pages of an `SdpaBackend`."""

    def __init__(
        self,
        backend: SdpaBackend,
        slots: Sequence[torch.Tensor],
        begun_pages: Sequence[torch.Tensor],
        families: list[_Family],
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self._backend = backend
        self._on_layer = on_layer
        self._slots = slots  # of each layer int64 [N]: rows of tokens
        self._begun_pages = begun_pages  # of each layer: pages that this step fills in part
        self._families = families

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionContext.forward`."""
        rows = self._backend.rows
        if len(self._begun_pages[layer]):
            rows.clear(self._begun_pages[layer])
        rows.write(self._slots[layer], torch.cat((k, v), dim=-1).flatten(1))
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
        if family.tokens is not None:
            q = q.index_select(0, family.tokens)
        n, kv_heads, query, group, dim = family.queries.shape
        family.queries.copy_(q.view(n, query, kv_heads, group, dim).transpose(1, 2))
        results = q.new_empty((n, query, kv_heads, group, dim))
        by_head = results.transpose(1, 2)
        for part in family.parts:
            self._backend.rows.gather(part.pages[layer], part.gathered)
            attended = scaled_dot_product_attention(
                part.queries, part.keys, part.values, attn_mask=part.mask, scale=self._backend.kind.scale
            )
            by_head[part.tiles] = attended[:, :, : query * group].view(-1, kv_heads, query, group, dim)
        return results.view(n * query, kv_heads * group, dim)


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
