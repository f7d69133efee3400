"""Weights of eight-bit integers on CPU, multiplied exactly.

A token's activations are rounded to sixteen bits, and each of them is two bytes: two rows for oneDNN's product of
bytes. Sums of integers are exact, so a row has the same bits in any batch. Few tokens are bound by the reading of the
weights, and wait for a quarter of the bytes of float32.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional

from engine.layers.linear import Linear
from engine.quantization.format import QuantisedFormat

_RANGE = 32700  # of activations in sixteen bits, with room for a rounding
_LEAST = 1e-30  # of a row of zeros
_VECTOR = 32  # elements of the two longest vectors of a CPU
_PIECE = 16384  # elements; torch does not share so few among threads


class Int8OnCpu(QuantisedFormat):
    """In float32, where `bytes_are_exact`."""

    name = "int8"
    dtype = torch.int8
    includes_output = True

    def pack(self, linear: Linear) -> None:
        """Packs the weight for oneDNN and frees the plain one."""
        self.round(linear)
        assert linear.weight_scale is not None
        pieces = zip(linear.weight.chunk(linear.pieces), linear.weight_scale.chunk(linear.pieces), strict=True)
        linear.packed = [tensor for rows, scales in pieces for tensor in _packed(rows, scales.flatten())]
        linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        linear.weight_scale = None

    def multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        product = _product(*_bytes(x), *linear.packed)
        return product if linear.bias is None else product.add_(linear.bias)

    def multiply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        rows, scale = _bytes(x)
        gate, up = _product(rows, scale, *linear.packed[:4]), _product(rows, scale, *linear.packed[4:])
        if linear.bias is not None:
            gate_bias, up_bias = linear.bias.chunk(2)
            gate, up = gate.add_(gate_bias), up.add_(up_bias)
        return up.mul_(_silu(gate))


@cache
def bytes_are_exact() -> bool:
    """Whether torch multiplies bytes exactly here. On CPUs without instructions for it, sums have too few bits."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):  # builds without oneDNN
        return False
    largest = torch.full((32, 256), 127, dtype=torch.int8)
    weight, scale, zeros, _ = _packed(largest, torch.ones(32))
    found = _multiply_bytes(torch.full((4, 256), 255, dtype=torch.uint8), weight, scale, zeros, torch.zeros(32))
    return bool((found == 256 * 127 * 127).all())


def _packed(weight: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """What `_product` needs of a weight int8 [N, K] with scales [N]: packed, scales, zero points and offsets [N]."""
    # An activation is 256 * high + low + 128, with both from -128 to 127. The offset, which is added to the products of
    # both, makes what the 128 makes.
    offset = weight.sum(dim=1, dtype=torch.int32) * scale * (128 / 257)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    return [torch.ops.onednn.qlinear_prepack(weight, None), scale.contiguous(), zeros, offset]


def _bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 [2 * M, K], scale float32 [M, 1]) of x [M, K]: the low bytes of all rows, then the high ones."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=_LEAST)
    rounded = (x * (_RANGE / largest)).add_(32768.5).to(torch.int32)  # little-endian, of which two bytes are used
    rows = rounded.view(torch.uint8).view(-1, 4)[:, :2].t().reshape(-1, x.shape[1])
    return rows, largest.div_(_RANGE)


def _product(rows: torch.Tensor, scale: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
    """The product [M, N] of what `_bytes` and `_packed` gave."""
    low, high = _multiply_bytes(rows, *packed).chunk(2)
    return low.add_(high, alpha=256).mul_(scale)


def _multiply_bytes(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """(rows - 128) @ weight.T * scale + offset, float32."""
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, 128, weight, scale, zeros, offset, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of rows [M, N], which do not depend on each other, where torch computes in whole vectors only."""
    padded = functional.pad(x, (0, -x.shape[1] % _VECTOR))
    flat = padded.view(-1)
    for start in range(0, len(flat), _PIECE):
        functional.silu(flat[start : start + _PIECE], inplace=True)
    return padded[:, : x.shape[1]]
