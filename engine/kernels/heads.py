"""Heads between projection and attention: norm and rotation of queries and keys, and the way into the cache."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options


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
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    table_row = tl.load(table_rows + token)
    if table_row < 0:  # padding
        return
    position = tl.load(positions + token)
    block = tl.load(tables + table_row * table_stride + position // PAGE).to(tl.int64)
    slot = block * block_stride + (position % PAGE) * (KV_HEADS * 2 * DIM)
    low = tl.arange(0, HALF)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    first = tl.load(source + low).to(tl.float32)
    second = tl.load(source + HALF + low).to(tl.float32)
    if head >= HEADS + KV_HEADS:  # a value: stored as it is
        place = cache + slot + (head - HEADS - KV_HEADS) * 2 * DIM + DIM
        tl.store(place + low, first.to(cache.dtype.element_ty))
        tl.store(place + HALF + low, second.to(cache.dtype.element_ty))
        return
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + eps)
        weight = q_weight if head < HEADS else k_weight
        # Rounded between norm and rotation, as the unfused operations do.
        first = (first * scale * tl.load(weight + low).to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        second = (second * scale * tl.load(weight + HALF + low).to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + position * HALF + low)
    s = tl.load(sin + position * HALF + low)
    turned = first * c - second * s
    turned_second = second * c + first * s
    if head < HEADS:
        place = q_out + (token * HEADS + head) * DIM
        tl.store(place + low, turned.to(q_out.dtype.element_ty))
        tl.store(place + HALF + low, turned_second.to(q_out.dtype.element_ty))
    else:
        place = cache + slot + (head - HEADS) * 2 * DIM
        tl.store(place + low, turned.to(cache.dtype.element_ty))
        tl.store(place + HALF + low, turned_second.to(cache.dtype.element_ty))


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
    _prepare_heads[(tokens, heads + 2 * kv_heads)](
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
        dim,
        page,
        norm is not None,
        num_warps=1,
        **launch_options(),
    )
    return q_out
