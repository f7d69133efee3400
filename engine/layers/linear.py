"""Matrix products whose rows do not depend on how many rows there are.

A request must get the same tokens alone and in any batch, so a row of a product must be the same bits whatever the
other rows. torch's float32 product on CPU is not like that (its kernels change with the batch size); oneDNN's product
with packed weights is, from two rows on, and it is up to three times faster at the sizes of decode.
"""

import torch
from torch import nn
from torch.nn import functional

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
        if not self._packed:
            return _product(x, self.weight, self.bias)
        return _multiply(x, self._packed[0], self.bias)


class GatedLinear(Linear):
    """silu(x @ gate.T) * (x @ up.T); weight and bias hold gate, then up.

    Packed, oneDNN applies the SiLU inside the product. torch's own has other last bits where a thread's share of the
    elements does not fill a vector, so it would depend on the batch.
    """

    def _split(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return weight.chunk(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in_features] to [M, parts[0]]."""
        if not self._packed:
            both = _product(x, self.weight, self.bias)
            if both.is_cuda:
                from engine.kernels.activation import silu_mul

                return silu_mul(both)
            gate, up = both.chunk(2, dim=-1)
            return functional.silu(gate).mul_(up)
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        gate = _multiply(x, self._packed[0], gate_bias, "swish")
        return gate.mul_(_multiply(x, self._packed[1], up_bias))


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias by the device's library; for one row on CUDA by a kernel that is faster."""
    if x.is_cuda and x.shape[0] == 1 and x.dtype != torch.float32:
        from engine.kernels.matvec import matvec

        return matvec(x, weight, bias)
    return functional.linear(x, weight, bias)


def _multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """oneDNN's product. One row takes a kernel of its own, with other last bits: it is computed as two."""
    rows = x.expand(2, -1).contiguous() if x.shape[0] == 1 else x
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, activation, [], "")
    return product[: x.shape[0]]
