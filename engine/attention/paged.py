"""Attention on CUDA devices: Triton kernels that read the paged cache in place.

A step's tokens carry their position and the row of a table that lists their sequence's blocks. The table lives on the
device from step to step, so that only what is new in it is sent: a sequence keeps its row as long as it keeps its
blocks.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionBackend, AttentionContext, HeadNorms, LayerKind, Span
from engine.attention.table_rows import Addition, TableRows
from engine.kernels.heads import prepare_heads
from engine.kernels.paged_attention import paged_decode, paged_prefill, prefill_splits, prefill_tile
from engine.kv_cache import KVCache
from engine.layers.rotary import Rotation

IntArray = npt.NDArray[np.int32]


class StepIndices(NamedTuple):
    """Where the N tokens of a step are, int32."""

    positions: IntArray  # [N]
    table_rows: IntArray  # [N]
    decodes: IntArray  # [B]: tokens that are alone of their sequence
    tiles: IntArray  # [4 * T]: of each piece of a prompt chunk first token, number of tokens, split of its keys, splits
    is_split: bool  # whether any has several splits


class BlockTables:
    """The block lists of sequences as rows int32 [rows, pages] of one tensor on the device."""

    def __init__(self, rows: int, pages: int, device: str) -> None:
        self.tensor = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self._rows = TableRows(rows)

    def rows_of(self, block_lists: Sequence[Sequence[int]]) -> IntArray:
        """Row of each list, brought up to date."""
        rows, additions = self._rows.rows_of(block_lists)
        if additions:
            self._write(additions)
        return np.array(rows, dtype=np.int32)

    def _write(self, additions: list[Addition]) -> None:
        pages = self.tensor.shape[1]
        places = np.concatenate([row * pages + start + np.arange(len(blocks)) for row, start, blocks in additions])
        values = np.concatenate([np.asarray(blocks, dtype=np.int64) for _, _, blocks in additions])
        sent = torch.from_numpy(np.stack((places, values))).pin_memory().to(self.tensor.device, non_blocking=True)
        self.tensor.view(-1).index_copy_(0, sent[0], sent[1].int())


class PagedContext(AttentionContext):
    """One step: `StepIndices` on the device. Tokens with a table row of -1 are padding, and tiles without tokens."""

    def __init__(
        self,
        backend: "PagedBackend",
        positions: torch.Tensor,  # [N]
        table_rows: torch.Tensor,  # [N], or more for padded decodes
        decodes: torch.Tensor,  # [B]
        tiles: torch.Tensor | None,  # [T, 4]; None: there are no prompts
        on_layer: Callable[[int], None] | None = None,
        is_split: bool = True,
    ) -> None:
        self.positions = positions
        self.table_rows = table_rows
        self.decodes = decodes
        self.tiles = tiles
        self._is_split = is_split  # whether any tile may have several splits
        self._backend = backend
        self._on_layer = on_layer

    def forward_projected(
        self, layer: int, qkv: torch.Tensor, heads: tuple[int, int, int], norms: HeadNorms | None, rotation: Rotation
    ) -> torch.Tensor:
        """See `AttentionContext.forward_projected`."""
        tables, kind = self._backend.tables.tensor, self._backend.kind
        cache = self._backend.cache.layer(layer)
        norm = None if norms is None else (norms.query.weight, norms.key.weight, norms.query.eps)
        q = prepare_heads(
            qkv, rotation.cos, rotation.sin, self.positions, self.table_rows, tables, cache, heads[0], norm
        )
        if self._on_layer is not None:
            self._on_layer(layer)
        out = torch.empty_like(q)
        limits = (kind.scale, kind.sliding_window or 0, kind.logit_softcap or 0.0)
        if len(self.decodes):
            paged_decode(q, cache, tables, self.table_rows, self.positions, self.decodes, out, *limits)
        if self.tiles is not None:
            paged_prefill(
                q, cache, tables, self.table_rows, self.positions, self.tiles, out, *limits, is_split=self._is_split
            )
        return out

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of `AttentionContext`; here heads are always prepared by `forward_projected`."""
        raise TypeError("on CUDA devices attention takes what the projection gave: call forward_projected")


class PagedBackend(AttentionBackend):
    """Plans steps for the kernels. `rows`: sequences of a step at most; `pages`: blocks of a sequence at most."""

    def __init__(self, cache: KVCache, kind: LayerKind, rows: int, pages: int) -> None:
        self.cache = cache
        self.kind = kind
        self.device = cache.tensor.device
        self.tables = BlockTables(rows, pages, str(self.device))
        self.tile = prefill_tile(cache.spec.head_dim)

    def plan(self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None) -> PagedContext:
        """One transfer to the device for all of the step's index tensors."""
        *indices, is_split = self.indices(spans)
        positions, table_rows, decodes, tiles = _together(indices, self.device)
        pieces = tiles.view(-1, 4) if len(tiles) else None
        return PagedContext(self, positions, table_rows, decodes, pieces, on_layer, is_split)

    def indices(self, spans: Sequence[Span]) -> StepIndices:
        """Where the spans' tokens are; brings the block tables up to date."""
        rows = self.tables.rows_of([span.block_ids for span in spans])
        starts = np.array([span.start for span in spans], dtype=np.int32)
        lengths = np.array([span.length for span in spans], dtype=np.int32)
        firsts = np.cumsum(lengths, dtype=np.int32) - lengths
        owner = np.repeat(np.arange(len(spans)), lengths)
        positions = (np.arange(len(owner)) - firsts[owner] + starts[owner]).astype(np.int32)
        pieces = [
            (first + offset, min(self.tile, length - offset))
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
            if length > 1
            for offset in range(0, length, self.tile)
        ]
        keys = int((starts + lengths)[lengths > 1].max(initial=0))
        splits = prefill_splits(len(pieces), self.kind.num_heads, min(keys, self.kind.sliding_window or keys))
        tiles = [(*piece, split, splits) for piece in pieces for split in range(splits)]
        packed = np.array(tiles, dtype=np.int32).reshape(-1)
        return StepIndices(positions, rows[owner], firsts[lengths == 1], packed, splits > 1)


def spaced(lengths: Sequence[int]) -> list[int]:
    """Where arrays int32 of these lengths begin in one, and its length.

    Each begins at a multiple of 16 bytes: for others kernels are compiled anew.
    """
    return [0, *accumulate(-(-length // 4) * 4 for length in lengths)]


def _together(parts: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    """Sends arrays in one transfer."""
    starts = spaced([len(part) for part in parts])
    pinned = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
    host = pinned.numpy()
    for start, part in zip(starts, parts, strict=False):
        host[start : start + len(part)] = part
    sent = pinned.to(device, non_blocking=True)
    return [sent[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]
