"""Matrix products whose rows do not depend on how many rows there are.

A request must get the same tokens alone and in any batch, so a row of a product must be the same bits whatever the other
rows. torch's float32 product on CPU is not like that (its kernels change with the batch size); oneDNN's product with packed
weights is, from two rows on, and it is up to three times faster at the sizes of decode.
"""

import torch
from torch import nn
from torch.nn import functional

_PACKING_BATCH = 32  # oneDNN chooses the packed format for about this many rows


class Linear(nn.Module):
    """y = x @ weight.T + bias, weight [out_features, in_features]. `pack` makes it ready after loading."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self, keep: bool = False) -> None:
        """Packs a float32 weight on CPU for oneDNN and frees the plain one unless `keep`."""
        if (
            self.weight.device.type == "cpu"
            and self.weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        ):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKING_BATCH)
            if not keep:
                self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in_features] to [M, out_features]."""
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        if x.shape[0] == 1:
            # One row takes a kernel of its own, with other last bits: computed as two.
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product
