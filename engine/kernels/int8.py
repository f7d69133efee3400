"""Products with weights of eight-bit integers, for more rows than `engine.kernels.few_rows` takes."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options

_NEIGHBOURS = 8  # tiles of rows whose programs start one after another, for the weights that they share


@triton.jit
def _int8_product(
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
    NEIGHBOURS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a tile of ROWS x COLUMNS of y. EVEN: K fits DEPTH."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, ROWS)
    in_band = NEIGHBOURS * tl.cdiv(N, COLUMNS)
    first = program // in_band * NEIGHBOURS
    height = tl.minimum(row_tiles - first, NEIGHBOURS)
    rows = (first + program % in_band % height) * ROWS + tl.arange(0, ROWS)
    columns = program % in_band // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    present, inside = rows < M, columns < N
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_places = x + rows[:, None].to(tl.int64) * K + depth[None, :]
    places = weight + columns[None, :].to(tl.int64) * K + depth[:, None]
    for start in range(0, K, DEPTH):
        if EVEN:
            values = tl.load(x_places + start, mask=present[:, None], other=0.0)
            piece = tl.load(places + start, mask=inside[None, :], other=0)
        else:
            valid = start + depth < K
            values = tl.load(x_places + start, mask=present[:, None] & valid[None, :], other=0.0)
            piece = tl.load(places + start, mask=inside[None, :] & valid[:, None], other=0)
        result = tl.dot(values, piece.to(values.dtype), result)
    result *= tl.load(weight_scale + columns, mask=inside, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(place, result.to(y.dtype.element_ty), mask=present[:, None] & inside[None, :])


def int8_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] @ (weight * weight_scale).T + bias, [M, N], summed in float32.

    x and bias [N] are float16 or bfloat16, weight int8 [N, K], weight_scale float32 [N, 1], all contiguous.
    """
    (m, k), n = x.shape, len(weight)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    rows, columns, depth, warps, stages = tiles(m)
    _int8_product[(triton.cdiv(m, rows) * triton.cdiv(n, columns),)](
        x,
        weight,
        weight_scale,
        weight_scale if bias is None else bias,
        y,
        m,
        n,
        k,
        rows,
        columns,
        depth,
        _NEIGHBOURS,
        bias is not None,
        k % depth == 0,
        num_warps=warps,
        num_stages=stages,
        **launch_options(),
    )
    return y


def tiles(m: int) -> tuple[int, int, int, int, int]:
    """(rows and columns of a tile, depth of the product that is held at once, warps, stages)."""
    return (64, 64, 128, 4, 4) if m <= 64 else (128, 128, 64, 8, 3)
