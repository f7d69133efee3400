"""SiLU of the gate times the up projection."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import launch_options

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)  # rounded as torch rounds between the two
    tl.store(out + row * SIZE + columns, active * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 * size], gate then up, to [N, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, _BLOCK))](gate_up, out, size, _BLOCK, num_warps=4, **launch_options())
    return out
