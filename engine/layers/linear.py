"""Matrix products whose rows do not depend on how many rows there are.

A request must get the same tokens alone and in any batch, so a row of a product must be the same bits whatever the
other rows. torch's float32 product on CPU is not like that (its kernels change with the batch size); oneDNN's product
with packed weights is, from two rows on, and it is up to three times faster at the sizes of decode.
"""

import torch
from torch import nn
from torch.nn import functional

from engine.layers.norm import RMSNorm

_LONGEST_NORMED = 8192  # columns; the kernel for one row holds a vector that it norms as a whole
_PACKING_BATCH = 32  # oneDNN chooses the packed format for about this many rows


class Linear(nn.Module):
    """y = x @ weight.T + bias for one projection or several fused ones. `pack` makes it ready after loading.

    weight [sum(parts), in_features]; `parts` are the output sizes of the fused projections, in order.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self._packed: list[torch.Tensor] = []

    def pack(self) -> None:
        """Packs a float32 weight on CPU for oneDNN and frees the plain one."""
        weight = self.weight.detach()
        packable = weight.device.type == "cpu" and weight.dtype == torch.float32
        if packable and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # missing in builds without oneDNN
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(rows, _PACKING_BATCH) for rows in self._split(weight)
            ]
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def _split(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces to pack: fused projections stay one product."""
        return (weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in_features] to [M, sum(parts)]."""
        if self._packed:
            return _multiply(x, self._packed[0], self.bias)
        if _is_one_row(x):
            from engine.kernels.matvec import matvec

            return matvec(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def of_normed(self, norm: RMSNorm, stream: torch.Tensor) -> torch.Tensor:
        """The product with the normed stream [M, in_features]."""
        if _is_one_row(stream) and stream.shape[1] <= _LONGEST_NORMED:
            from engine.kernels.matvec import matvec

            return matvec(stream, self.weight, self.bias, norm=(norm.weight, norm.eps))
        y: torch.Tensor = self(norm(stream))
        return y

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product with x [M, in_features] to the stream [M, sum(parts)], in place."""
        if _is_one_row(x):
            from engine.kernels.matvec import matvec

            matvec(x, self.weight, self.bias, add_to=stream)
        elif x.is_cuda and self.bias is None:
            stream.addmm_(x, self.weight.t())  # the library adds while it stores
        else:
            stream += self(x)


class GatedLinear(Linear):
    """silu(x @ gate.T) * (x @ up.T); weight and bias hold gate, then up.

    Packed, oneDNN applies the SiLU inside the product. torch's own has other last bits where a thread's share of the
    elements does not fill a vector, so it would depend on the batch.
    """

    def _split(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return weight.chunk(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in_features] to [M, parts[0]]."""
        if self._packed:
            gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
            gate = _multiply(x, self._packed[0], gate_bias, "swish")
            return gate.mul_(_multiply(x, self._packed[1], up_bias))
        both = functional.linear(x, self.weight, self.bias)
        if both.is_cuda:
            from engine.kernels.activation import silu_mul

            return silu_mul(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def of_normed(self, norm: RMSNorm, stream: torch.Tensor) -> torch.Tensor:
        """Of the normed stream [M, in_features]."""
        if _is_one_row(stream) and stream.shape[1] <= _LONGEST_NORMED:
            from engine.kernels.matvec import matvec

            return matvec(stream, self.weight, self.bias, norm=(norm.weight, norm.eps), gated=True)
        y: torch.Tensor = self(norm(stream))
        return y


def _is_one_row(x: torch.Tensor) -> bool:
    """Whether a kernel of ours is faster than the device's library."""
    return x.is_cuda and x.shape[0] == 1 and x.dtype != torch.float32


def _multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """oneDNN's product. One row takes a kernel of its own, with other last bits: it is computed as two."""
    rows = x.expand(2, -1).contiguous() if x.shape[0] == 1 else x
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, activation, [], "")
    return product[: x.shape[0]]
