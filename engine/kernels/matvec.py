"""Products of a matrix and one vector, with what stands before and after them in a decoder.

For one row a product is the reading of its weights. Libraries do not reach the speed of memory there, and norm, SiLU
and residual each would be a kernel that takes longer to start than to run.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options

_PIECE = 2048  # columns of a longer vector that are held at once


@triton.jit
def _matvec(
    x,
    norm_weight,
    weight,
    weight_scale,
    bias,
    y,
    eps,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows of y. WHOLE: K fits COLUMNS. The first piece of weights is asked for before waiting."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    columns = tl.arange(0, COLUMNS)
    valid = columns < K
    mask = inside[:, None] & valid[None, :]
    places = rows[:, None].to(tl.int64) * K + columns[None, :]
    piece = tl.load(weight + places, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        places_up = (N + rows)[:, None].to(tl.int64) * K + columns[None, :]
        second = tl.load(weight + places_up, mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    vector = tl.load(x + columns, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(vector * vector, axis=0) / K + eps)
        vector = vector * scale * tl.load(norm_weight + columns, mask=valid, other=0.0).to(tl.float32)
        vector = vector.to(x.dtype.element_ty).to(tl.float32)  # rounded as the norm alone would
    if WHOLE:
        result = tl.sum(piece.to(tl.float32) * vector[None, :], axis=1)
        if GATED:
            up = tl.sum(second.to(tl.float32) * vector[None, :], axis=1)
    else:
        total = piece.to(tl.float32) * vector[None, :]
        if GATED:
            total_up = second.to(tl.float32) * vector[None, :]
        for start in range(COLUMNS, K, COLUMNS):
            valid = start + columns < K
            mask = inside[:, None] & valid[None, :]
            vector = tl.load(x + start + columns, mask=valid, other=0.0).to(tl.float32)
            piece = tl.load(weight + start + places, mask=mask, other=0.0, eviction_policy="evict_first")
            total += piece.to(tl.float32) * vector[None, :]
            if GATED:
                second = tl.load(weight + start + places_up, mask=mask, other=0.0, eviction_policy="evict_first")
                total_up += second.to(tl.float32) * vector[None, :]
        result = tl.sum(total, axis=1)
        if GATED:
            up = tl.sum(total_up, axis=1)
    if SCALED:
        result *= tl.load(weight_scale + rows, mask=inside, other=0.0)
        if GATED:
            up *= tl.load(weight_scale + N + rows, mask=inside, other=0.0)
    if BIAS:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = result.to(y.dtype.element_ty).to(tl.float32)  # rounded where the product alone would
        active = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
        result = active * up.to(y.dtype.element_ty).to(tl.float32)
    if ADD:
        result += tl.load(y + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + rows, result.to(y.dtype.element_ty), mask=inside)


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_scale: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [1, K] @ weight.T + bias, summed in float32; weight [N, K], bias [N], all contiguous.

    x and bias have one dtype, and the weight has it too or is quantised: float8_e4m3fn or int8, with a `weight_scale`
    float32 [N, 1] for its rows; x is not rounded then.
    norm: weight [K] and epsilon of an RMS norm that x goes through first; K is at most 8192. gated: weight
    and bias hold gate, then up, and silu(gate) * up is returned, [1, N / 2]. add_to [1, N]: the product is added to it,
    in place, and it is returned.
    """
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    y = torch.empty((1, n), dtype=x.dtype, device=x.device) if add_to is None else add_to
    columns = triton.next_power_of_2(k) if norm is not None else min(_PIECE, triton.next_power_of_2(k))
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    rows = rows_of_a_program(columns * weight.itemsize, gated)
    _matvec[(triton.cdiv(n, rows),)](
        x,
        norm_weight,
        weight,
        weight if weight_scale is None else weight_scale,
        weight if bias is None else bias,
        y,
        eps,
        n,
        k,
        rows,
        columns,
        columns >= k,
        norm is not None,
        gated,
        add_to is not None,
        weight_scale is not None,
        bias is not None,
        num_warps=4,
        num_stages=2,
        **launch_options(),
    )
    return y


def rows_of_a_program(row_bytes: int, gated: bool) -> int:
    """Rows of y that a program computes: as many as keep the weights that it holds at once within 16 KiB or so."""
    return max(1, 16384 // row_bytes // (2 if gated else 1))
