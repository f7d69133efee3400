"""Products of a matrix and a few rows, 2 to 32, with the SiLU or the residual that follows.

Such a product is bound by the reading of its weights, as that of one row is (`engine.kernels.matvec`), but tensor cores
multiply: rows are padded to 16, their smallest tile, or 32.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.testing import get_dram_gbps

from engine.kernels.launch import launch_options

_FAST_MEMORY = 3500.0  # GB/s


@triton.jit
def _few_rows(
    x,
    weight,
    weight_scale,
    bias,
    y,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for COLUMNS columns of y, all rows. EVEN: N fits COLUMNS, and K fits DEPTH."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = columns < N
    present = rows < M
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_places = x + rows[:, None] * K + depth[None, :]
    places = weight + columns[None, :].to(tl.int64) * K + depth[:, None]
    up_places = weight + (N + columns)[None, :].to(tl.int64) * K + depth[:, None]
    for start in range(0, K, DEPTH):
        if EVEN:
            piece = tl.load(places + start)
            values = tl.load(x_places + start, mask=present[:, None], other=0.0)
        else:
            valid = start + depth < K
            piece = tl.load(places + start, mask=valid[:, None] & inside[None, :], other=0.0)
            values = tl.load(x_places + start, mask=present[:, None] & valid[None, :], other=0.0)
        result = tl.dot(values, piece.to(values.dtype), result)
        if GATED:
            if EVEN:
                second = tl.load(up_places + start)
            else:
                second = tl.load(up_places + start, mask=valid[:, None] & inside[None, :], other=0.0)
            up = tl.dot(values, second.to(values.dtype), up)
    if SCALED:
        result *= tl.load(weight_scale + columns, mask=inside, other=0.0)[None, :]
        if GATED:
            up *= tl.load(weight_scale + N + columns, mask=inside, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate = result.to(y.dtype.element_ty).to(tl.float32)  # rounded where the product alone would
        active = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
        result = active * up.to(y.dtype.element_ty).to(tl.float32)
    y_places = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    stored = present[:, None] & inside[None, :]
    if ADD:
        result += tl.load(y_places, mask=stored, other=0.0).to(tl.float32)
    tl.store(y_places, result.to(y.dtype.element_ty), mask=stored)


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_scale: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight.T + bias of at most 32 rows; weight [N, K], bias [N], contiguous, in half precision.

    A quantised weight is of float8_e4m3fn or int8 and has a `weight_scale` float32 [N, 1]; x is not rounded then.
    gated: weight and bias hold gate, then up, and silu(gate) * up is returned, [M, N / 2]. add_to [M, N]: the product
    is added to it, in place, and it is returned.
    """
    m = x.shape[0]
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device) if add_to is None else add_to
    columns, depth, warps, stages = tiles(k, gated)
    _few_rows[(triton.cdiv(n, columns),)](
        x,
        weight,
        weight if weight_scale is None else weight_scale,
        weight if bias is None else bias,
        y,
        m,
        n,
        k,
        16 if m <= 16 else 32,
        columns,
        depth,
        gated,
        add_to is not None,
        weight_scale is not None,
        bias is not None,
        n % columns == 0 and k % depth == 0,
        num_warps=warps,
        num_stages=stages,
        **launch_options(),
    )
    return y


def tiles(k: int, gated: bool) -> tuple[int, int, int, int]:
    """(columns of y and depth of the product that a program holds at once, warps, stages): the best on an H100."""
    return 16, min(512, triton.next_power_of_2(k)), 2, 2 if gated else 3


@cache
def most_rows(device: torch.device) -> int:
    """Rows up to which this is faster than the device's library.

    Up to 16 rows are one tile, and cost no more than the reading of the weight. With 32 the kernel keeps up with about
    3,200 GB/s of weights: enough for an H100, not for an H200.
    """
    return 16 if get_dram_gbps(device.index) > _FAST_MEMORY else 32
