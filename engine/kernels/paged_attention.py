"""Attention over a paged KV cache: FlashAttention (Dao, 2022) for prompt chunks, split-KV decoding (Dao et al., 2023).

The keys of few prompt tokens are split, too, where there are many: of a prompt whose beginning was cached, the rest.

The cache's layer is [blocks, page, kv_heads, 2 * dim], K then V, with any stride between blocks: a token's K and V of
one head lie together. Softmax runs in base 2; sums are float32.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options


@triton.jit
def _places(
    keys,
    valid,
    tables,
    table_row,
    table_stride,
    block_stride,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Where the K of each key begins in the cache; its V follows DIM later."""
    block = tl.load(tables + table_row * table_stride + keys // PAGE, mask=valid, other=0).to(tl.int64)
    return block * block_stride + (keys % PAGE) * (KV_HEADS * 2 * DIM) + kv_head * 2 * DIM


@triton.jit
def _scored(queries, k, scale, SOFTCAP: tl.constexpr):
    """(products [Q, K] of queries [Q, DIM] and keys [DIM, K], capped if asked; factor that makes them log2 weights)."""
    scores = tl.dot(queries, k, input_precision="ieee")
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 / SOFTCAP * scale * scores)))
        return scores, 1.4426950408889634  # log2(e)
    return scores, scale * 1.4426950408889634


@triton.jit
def _fold(scores, factor, v, best, total, result):
    """Takes scores [Q, K] of values v [K, DIM] into the softmax so far: its maximum, its sum, and the weighted sum."""
    higher = tl.maximum(best, tl.max(scores, axis=1) * factor)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    p = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(p, axis=1)
    result = tl.dot(p.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
    return higher, total, result


_PROGRAMS_A_CARD = 1056  # programs that fill an H100: eight for each of 132 multiprocessors
_MOST_SPLITS = 32


@triton.jit
def _decode(
    q,
    cache,
    tables,
    table_rows,
    positions,
    rows,
    out,
    partial,
    weights,
    scale,
    block_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a sequence, a KV head with its GROUP (>= 16 rows) of query heads, and a split of the keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    PER_KV: tl.constexpr = HEADS // KV_HEADS
    group = tl.arange(0, GROUP)
    dims = tl.arange(0, DIM)
    head = kv_head * PER_KV + group
    inside = group < PER_KV
    row = tl.load(rows + sequence).to(tl.int64)
    table_row = tl.load(table_rows + row)
    if table_row < 0:  # padding
        return
    length = tl.load(positions + row) + 1
    queries = tl.load(q + (row * HEADS + head[:, None]) * DIM + dims[None, :], mask=inside[:, None], other=0.0)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, length - WINDOW) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(length - begin, SPLITS), KEYS) * KEYS
    start = begin + split * share
    end = tl.minimum(length, start + share)

    best = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    result = tl.zeros([GROUP, DIM], tl.float32)
    for first in range(start, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        valid = keys < end
        place = _places(keys, valid, tables, table_row, table_stride, block_stride, kv_head, KV_HEADS, DIM, PAGE)
        k = tl.load(cache + place[None, :] + dims[:, None], mask=valid[None, :], other=0.0).to(queries.dtype)
        v = tl.load(cache + place[:, None] + DIM + dims[None, :], mask=valid[:, None], other=0.0).to(queries.dtype)
        scores, factor = _scored(queries, k, scale, SOFTCAP)
        seen = valid
        if WINDOW > 0:
            seen = valid & (keys >= length - WINDOW)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        best, total, result = _fold(scores, factor, v, best, total, result)
    if SPLITS == 1:
        result = result / total[:, None]
        place = out + (row * HEADS + head[:, None]) * DIM + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        at = (sequence * HEADS + head) * SPLITS + split
        tl.store(partial + at[:, None] * DIM + dims[None, :], result, mask=inside[:, None])
        tl.store(weights + at * 2, best, mask=inside)
        tl.store(weights + at * 2 + 1, total, mask=inside)


@triton.jit
def _combine(
    partial,
    weights,
    table_rows,
    rows,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a sequence and query head: adds up what the splits found."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + sequence).to(tl.int64)
    if tl.load(table_rows + row) < 0:  # padding
        return
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    at = (sequence * HEADS + head) * SPLITS + splits
    best = tl.load(weights + at * 2)
    total = tl.load(weights + at * 2 + 1)
    factor = tl.exp2(best - tl.max(best, axis=0))
    parts = tl.load(partial + at[:, None] * DIM + dims[None, :])
    result = tl.sum(parts * factor[:, None], axis=0) / tl.sum(total * factor, axis=0)
    tl.store(out + (row * HEADS + head) * DIM + dims, result.to(out.dtype.element_ty))


def decode_splits(sequences: int, kv_heads: int) -> int:
    """Into how many parts the keys are cut, so that few sequences fill the card, too. A power of two."""
    wanted = -(-_PROGRAMS_A_CARD // (sequences * kv_heads))
    return int(min(_MOST_SPLITS, triton.next_power_of_2(wanted)))


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Tokens that are alone of their sequences in a step, each against all keys up to its own.

    q, out [N, heads, dim]; tables int32 [any, pages]; of each of the N tokens its row of `tables`, table_rows int32 [N]
    (-1: padding, skipped), and its position, positions int32 [N]; rows int32 [B]: the tokens meant. Writes their rows
    of `out`.
    """
    heads, dim = q.shape[1:]
    page, kv_heads = cache.shape[1:3]
    sequences = len(rows)
    splits = decode_splits(sequences, kv_heads)
    keys, warps, stages = decode_shape(dim)
    partial = torch.empty((sequences, heads, splits, dim) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    weights = torch.empty((sequences, heads, splits, 2) if splits > 1 else 0, dtype=torch.float32, device=q.device)
    _decode[(sequences, kv_heads, splits)](
        q,
        cache,
        tables,
        table_rows,
        positions,
        rows,
        out,
        partial,
        weights,
        scale,
        cache.stride(0),
        tables.stride(0),
        heads,
        kv_heads,
        max(16, triton.next_power_of_2(heads // kv_heads)),
        dim,
        page,
        keys,
        splits,
        window,
        softcap,
        num_warps=warps,
        num_stages=stages,
        **launch_options(),
    )
    if splits > 1:
        _combine[(sequences, heads)](
            partial, weights, table_rows, rows, out, heads, dim, splits, num_warps=2, **launch_options()
        )


MOST_SPLIT_TILES = 32  # a padded step has room for so many
_PREFILL_PROGRAMS = 256  # of `_prefill`, of which an H100 runs 132 at once
_LEAST_KEYS = 1024  # for fewer, adding up would take longer


@triton.jit
def _prefill(
    q,
    cache,
    tables,
    table_rows,
    positions,
    tiles,
    out,
    partial,
    weights,
    scale,
    block_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a tile of query tokens with a split of its keys, and a query head.

    A tile: first row of q, rows, number of the split, and splits, which follow each other.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # those with the most keys first
    head = tl.program_id(0)
    row = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    if count == 0:  # padding
        return
    split = tl.load(tiles + tile * 4 + 2)
    splits = tl.load(tiles + tile * 4 + 3)
    table_row = tl.load(table_rows + row)
    position = tl.load(positions + row)
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    kv_head = head // (HEADS // KV_HEADS)
    inside = queries < count
    place = (row + queries[:, None]) * (HEADS * DIM) + head * DIM + dims[None, :]
    qs = tl.load(q + place, mask=inside[:, None], other=0.0)

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, DIM], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, position + 1 - WINDOW) // KEYS * KEYS
    end = position + count
    share = tl.cdiv(tl.cdiv(end - begin, splits), KEYS) * KEYS
    start = begin + split * share
    stop = tl.minimum(end, start + share)
    # Keys that every query of the tile sees need no mask; those at the end, and at the begin of a window, do.
    clear = start
    if WINDOW == 0:
        clear = tl.maximum(start, tl.minimum(stop, (position + 1) // KEYS * KEYS))
        for first in range(start, clear, KEYS):
            keys = first + tl.arange(0, KEYS)
            at = _places(keys, keys >= 0, tables, table_row, table_stride, block_stride, kv_head, KV_HEADS, DIM, PAGE)
            k = tl.load(cache + at[None, :] + dims[:, None]).to(qs.dtype)
            scores, factor = _scored(qs, k, scale, SOFTCAP)
            v = tl.load(cache + at[:, None] + DIM + dims[None, :]).to(qs.dtype)
            best, total, result = _fold(scores, factor, v, best, total, result)
    for first in range(clear, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        valid = keys < stop
        at = _places(keys, valid, tables, table_row, table_stride, block_stride, kv_head, KV_HEADS, DIM, PAGE)
        k = tl.load(cache + at[None, :] + dims[:, None], mask=valid[None, :], other=0.0).to(qs.dtype)
        scores, factor = _scored(qs, k, scale, SOFTCAP)
        seen = keys[None, :] <= position + queries[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position + queries[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(cache + at[:, None] + DIM + dims[None, :], mask=valid[:, None], other=0.0).to(qs.dtype)
        best, total, result = _fold(scores, factor, v, best, total, result)
    if splits == 1:
        tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    else:
        at = (tile * HEADS + head) * QUERIES + queries
        tl.store(partial + at[:, None] * DIM + dims[None, :], result, mask=inside[:, None])
        tl.store(weights + at * 2, best, mask=inside)
        tl.store(weights + at * 2 + 1, total, mask=inside)


@triton.jit
def _combine_tiles(
    partial,
    weights,
    tiles,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for the first split of a tile, and a query head: adds up what all of its splits found."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.load(tiles + tile * 4 + 3)
    if (splits <= 1) | (tl.load(tiles + tile * 4 + 2) > 0):
        return
    row = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    inside = queries < count
    first = (tile * HEADS + head) * QUERIES + queries
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    for split in range(0, splits):
        at = first + split * (HEADS * QUERIES)
        most = tl.maximum(most, tl.load(weights + at * 2, mask=inside, other=0.0))
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, DIM], tl.float32)
    for split in range(0, splits):
        at = first + split * (HEADS * QUERIES)
        factor = tl.exp2(tl.load(weights + at * 2, mask=inside, other=0.0) - most)
        total += tl.load(weights + at * 2 + 1, mask=inside, other=1.0) * factor
        part = tl.load(partial + at[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
        result += part * factor[:, None]
    place = (row + queries[:, None]) * (HEADS * DIM) + head * DIM + dims[None, :]
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def prefill_splits(tiles: int, heads: int, keys: int) -> int:
    """Into how many parts the keys of each of few tiles are cut, so that they fill the card, too. A power of two.

    `keys`: of the longest. Never more than `MOST_SPLIT_TILES` for all tiles together.
    """
    if keys < _LEAST_KEYS:
        return 1
    free = max(1, _split_tiles(heads) // tiles)
    return 1 << (free.bit_length() - 1)


def _split_tiles(heads: int) -> int:
    """Splits of all tiles together, at most, where there are several of a tile."""
    return max(1, min(MOST_SPLIT_TILES, _PREFILL_PROGRAMS // heads))


def prefill_tile(dim: int) -> int:
    """Query tokens of a tile."""
    return 64 if dim > 128 else 128


def prefill_shape(dim: int, itemsize: int) -> tuple[int, int, int]:
    """(keys that a program holds at once, warps, stages), for numbers of `itemsize` bytes: what fits shared memory."""
    if dim * itemsize > 256:
        return 32, 8, 2
    return (128, 8, 3) if dim > 64 else (64, 4, 3)


def decode_shape(dim: int) -> tuple[int, int, int]:
    """(keys that a program holds at once, warps, stages)."""
    return 64 if dim <= 128 else 32, 4, 3


def paged_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    is_split: bool = True,
) -> None:
    """Chunks of prompts against all keys up to each of their tokens, which are in the cache already.

    q, out, tables, table_rows, positions as in `paged_decode`; tiles int32 [T, 4]: first row of q and number of rows
    (at most `prefill_tile`; 0: padding, skipped), which are neighbours in one sequence; which split of their keys, and
    of how many. All splits of a tile are there, one behind another, the more than one among the first
    `MOST_SPLIT_TILES`. `is_split`: whether there may be more than one.
    """
    heads, dim = q.shape[1:]
    page, kv_heads = cache.shape[1:3]
    keys, warps, stages = prefill_shape(dim, q.itemsize)
    queries, most = prefill_tile(dim), min(_split_tiles(heads), len(tiles)) if is_split else 0
    partial = torch.empty((most, heads, queries, dim), dtype=torch.float32, device=q.device)
    weights = torch.empty((most, heads, queries, 2), dtype=torch.float32, device=q.device)
    _prefill[(heads, len(tiles))](
        q,
        cache,
        tables,
        table_rows,
        positions,
        tiles,
        out,
        partial,
        weights,
        scale,
        cache.stride(0),
        tables.stride(0),
        heads,
        kv_heads,
        dim,
        page,
        queries,
        keys,
        window,
        softcap,
        num_warps=warps,
        num_stages=stages,
        **launch_options(),
    )
    if is_split:
        _combine_tiles[(most, heads)](
            partial, weights, tiles, out, heads, dim, queries, num_warps=8, **launch_options()
        )
