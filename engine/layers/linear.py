"""Matrix products whose rows do not depend on how many rows there are.

A request must get the same tokens alone and in any batch, so a row of a product must be the same bits whatever the
other rows. torch's float32 product on CPU is not like that (its kernels change with the batch size); oneDNN's product
with packed weights is, from two rows on, and it is up to three times faster at the sizes of decode.

How a weight is kept and multiplied by is the business of its format: `WeightFormat` keeps it as it is loaded, those of
`engine.quantization` in eight bits.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.layers.norm import RMSNorm

_LONGEST_NORMED = 8192  # columns; the kernel for one row holds a vector that it norms as a whole
_PACKING_BATCH = 32  # oneDNN chooses the packed format for about this many rows


class Linear(nn.Module):
    """y = x @ weight.T + bias for one projection or several fused ones. `pack` makes it ready after loading.

    weight [sum(parts), in_features]; `parts` are the output sizes of the fused projections, in order. Rows of a
    quantised weight are multiplied by `weight_scale`, float32 [sum(parts), 1].
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor | None
    bias: torch.Tensor | None
    pieces = 1  # equal parts of the rows that are packed each on its own

    def __init__(self, in_features: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.format = WeightFormat()
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features), requires_grad=False)
        self.register_parameter("weight_scale", None)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: list[torch.Tensor] = []

    def pack(self) -> None:
        """Brings the weight into the shape in which its format multiplies."""
        self.format.pack(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in_features] to [M, sum(parts)]."""
        return self._of_few_rows(x) if self._takes_few(x) else self._of_rows(x)

    def of_normed(self, norm: RMSNorm, stream: torch.Tensor) -> torch.Tensor:
        """The product with the normed stream [M, in_features]."""
        if _is_one_row(stream) and stream.shape[1] <= _LONGEST_NORMED:
            return self._of_few_rows(stream, norm=(norm.weight, norm.eps))
        y: torch.Tensor = self(norm(stream))
        return y

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product with x [M, in_features] to the stream [M, sum(parts)], in place."""
        if self._takes_few(x):
            self._of_few_rows(x, add_to=stream)
        else:
            self.format.add_product(self, stream, x)

    def _takes_few(self, x: torch.Tensor) -> bool:
        """Whether a kernel of ours is faster than the format's own product."""
        return x.is_cuda and x.dtype != torch.float32 and x.shape[0] <= self.format.few_rows(x.device)

    def _of_few_rows(self, x: torch.Tensor, **fused: Any) -> torch.Tensor:
        """By kernels for weights of any format, which do in passing what stands before or after the product."""
        from engine.kernels.few_rows import few_rows
        from engine.kernels.matvec import matvec

        kernel = matvec if _is_one_row(x) else few_rows
        return kernel(x, self.weight, self.bias, weight_scale=self.weight_scale, **fused)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """By the format's own product."""
        return self.format.multiply(self, x)


class GatedLinear(Linear):
    """silu(x @ gate.T) * (x @ up.T); weight and bias hold gate, then up."""

    pieces = 2

    def _of_few_rows(self, x: torch.Tensor, **fused: Any) -> torch.Tensor:
        """[M, in_features] to [M, parts[0]]."""
        return super()._of_few_rows(x, gated=True, **fused)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.format.multiply_gated(self, x)


class WeightFormat:
    """Weights as they are loaded; float32 and bfloat16 on CPU are packed for oneDNN."""

    def pack(self, linear: Linear) -> None:
        """Called once the weight is loaded. Packs it if that helps, and then frees the plain one."""
        weight = linear.weight.detach()
        if weight.device.type == "cpu" and _packs(weight.dtype):
            linear.packed = [
                torch.ops.mkldnn._reorder_linear_weight(rows, _PACKING_BATCH) for rows in weight.chunk(linear.pieces)
            ]
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def few_rows(self, device: torch.device) -> int:
        """Rows up to which a product on this CUDA device is one of our kernel's."""
        from engine.kernels.few_rows import most_rows

        return most_rows(device)

    def multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias, [M, in_features] to [M, out_features], in the type of x."""
        if linear.packed:
            return _multiply_packed(x, linear.packed[0], linear.bias)
        return functional.linear(x, linear.weight, linear.bias)

    def multiply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half of the product's columns times the second half.

        Packed, oneDNN applies the SiLU and the multiplication inside the products. torch's own SiLU has other last bits
        where a thread's share of the elements does not fill a vector, so it would depend on the batch.
        """
        if linear.packed:
            gate_bias, up_bias = (None, None) if linear.bias is None else linear.bias.chunk(2)
            rows = _two_or_more(x)
            gate = torch.ops.mkldnn._linear_pointwise(rows, linear.packed[0], gate_bias, "swish", [], "")
            both: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, gate, linear.packed[1], up_bias, "mul")
            return both[: x.shape[0]]
        both = self.multiply(linear, x)
        if both.is_cuda:
            from engine.kernels.activation import silu_mul

            return silu_mul(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def add_product(self, linear: Linear, stream: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product to the stream [M, out_features], in place."""
        if x.is_cuda and linear.bias is None:
            stream.addmm_(x, linear.weight.t())  # the library adds while it stores
        else:
            stream += self.multiply(linear, x)


def _is_one_row(x: torch.Tensor) -> bool:
    """Whether that is the kernel for one row, which norms, too."""
    return x.is_cuda and x.shape[0] == 1 and x.dtype != torch.float32


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products for packed weights of this type: no build without it has, nor every CPU bfloat16."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiply_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(_two_or_more(x), packed, bias, "none", [], "")
    return product[: x.shape[0]]


def _two_or_more(x: torch.Tensor) -> torch.Tensor:
    """The rows to multiply: oneDNN has another kernel for one row, with other last bits, so one is computed as two."""
    return x.expand(2, -1).contiguous() if x.shape[0] == 1 else x
