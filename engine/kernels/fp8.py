"""Activations on their way into FP8 products."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options


@triton.jit
def _round_tokens(x, rounded, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a row, which it holds as a whole."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    value = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-12)
    # 448 is the largest number of the type; NaN stays NaN.
    value = tl.clamp(value / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(rounded + row * SIZE + columns, value.to(rounded.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [M, K], scale float32 [M, 1]) of x [M, K], contiguous: see `engine.quantization.rounding`."""
    rows, size = x.shape
    rounded = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    _round_tokens[(rows,)](x, rounded, scales, size, block, num_warps=warps, **launch_options())
    return rounded, scales
