"""Heads between projection and attention: norm and rotation of queries and keys, and the way into the cache."""

from math import gcd

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options


@triton.jit
def _store(place, values):
    """Into the cache. In FP8 what is too large becomes the largest number."""
    if place.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(place, values.to(place.dtype.element_ty))


@triton.jit
def _prepare_heads(
    qkv,
    cos,
    sin,
    positions,
    table_rows,
    tables,
    q_weight,
    k_weight,
    q_out,
    cache,
    eps,
    block_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and GROUP heads, all of one kind: queries, keys or values."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * GROUP
    HALF: tl.constexpr = DIM // 2
    table_row = tl.load(table_rows + token)
    if table_row < 0:  # padding
        return
    position = tl.load(positions + token)
    block = tl.load(tables + table_row * table_stride + position // PAGE).to(tl.int64)
    slot = cache + block * block_stride + (position % PAGE) * (KV_HEADS * 2 * DIM)
    head = first_head + tl.arange(0, GROUP)[:, None]
    low = tl.arange(0, HALF)[None, :]
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + low
    first = tl.load(source).to(tl.float32)
    second = tl.load(source + HALF).to(tl.float32)
    if first_head >= HEADS + KV_HEADS:  # values: stored as they are
        value_place = slot + (head - HEADS - KV_HEADS) * 2 * DIM + DIM + low
        _store(value_place, first)
        _store(value_place + HALF, second)
        return
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        weight = (q_weight if first_head < HEADS else k_weight) + low
        # Rounded between norm and rotation, as the unfused operations do.
        first = (first * scale * tl.load(weight).to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        second = (second * scale * tl.load(weight + HALF).to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + position * HALF + low)
    s = tl.load(sin + position * HALF + low)
    turned = first * c - second * s
    turned_second = second * c + first * s
    if first_head < HEADS:
        # A name of its own for each kind of place: the types of the pointers differ.
        query_place = q_out + (token * HEADS + head) * DIM + low
        tl.store(query_place, turned.to(q_out.dtype.element_ty))
        tl.store(query_place + HALF, turned_second.to(q_out.dtype.element_ty))
    else:
        key_place = slot + (head - HEADS) * 2 * DIM + low
        _store(key_place, turned)
        _store(key_place + HALF, turned_second)


def prepare_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    tables: torch.Tensor,
    cache: torch.Tensor,
    heads: int,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Norms (if asked) and rotates queries and keys, stores keys and values; returns the queries [N, heads, dim].

    qkv [N, (heads + 2 * kv_heads) * dim]; cos, sin float32 [positions, dim / 2]; positions int32 [N]; table_rows int32
    [N], row of `tables` int32 [rows, pages] with the token's blocks, -1 for padding, which is skipped; cache [blocks,
    page, kv_heads, 2 * dim], a layer of the KV cache (a view); norm: weights [dim] of query and key, and epsilon.
    """
    page, kv_heads, dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    tokens = qkv.shape[0]
    q_out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norm if norm is not None else (qkv, qkv, 0.0)
    group = min(8, gcd(heads, kv_heads) & -gcd(heads, kv_heads))  # a power of two
    _prepare_heads[(tokens, (heads + 2 * kv_heads) // group)](
        qkv,
        cos,
        sin,
        positions,
        table_rows,
        tables,
        q_weight,
        k_weight,
        q_out,
        cache,
        eps,
        cache.stride(0),
        tables.stride(0),
        heads,
        kv_heads,
        group,
        dim,
        page,
        norm is not None,
        num_warps=max(1, group * dim // 512),
        **launch_options(),
    )
    return q_out
