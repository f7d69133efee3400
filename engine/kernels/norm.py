"""Addition to the residual stream and root-mean-square norm in one pass."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_X: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    stream = tl.load(residual + row + columns, mask=inside, other=0.0)
    if HAS_X:
        # Summed in the stream's own type, as torch would, before the norm looks at it.
        added = stream.to(tl.float32) + tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
        stream = added.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, stream, mask=inside)
    value = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    normed = value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [N, size] += x [N, size], in place; returns residual / rms(residual) * weight, of the same shape."""
    rows, size = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 256))
    _add_rms_norm[(rows,)](
        residual if x is None else x, residual, weight, out, eps, size, block, x is not None, num_warps=warps
    )
    return out
