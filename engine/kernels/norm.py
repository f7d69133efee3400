"""Root-mean-square norm."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    tl.store(out + row + columns, (value * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, size], contiguous: x / rms(x) * weight, of the same shape."""
    rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 256))
    _rms_norm[(rows,)](x, weight, out, eps, size, block, num_warps=warps, **launch_options())
    return out
