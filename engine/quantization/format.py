"""What the quantised formats share."""

import torch
from torch import nn

from engine.config import ModelError
from engine.layers.linear import Linear, WeightFormat


class QuantisedFormat(WeightFormat):
    """Weights of one byte, with a scale for each row."""

    name = ""  # in the configuration, and part of the identity of a model
    dtype = torch.int8
    multiple = 1  # both sizes of a weight must be multiples of this

    def allocate(self, linear: Linear) -> None:
        """Gives the linear layer parameters of this format, before anything is loaded."""
        rows, columns = linear.weight.shape
        if rows % self.multiple or columns % self.multiple:
            raise ModelError(
                f"a weight of {rows} x {columns} cannot be {self.name} on this device: its sizes must be multiples of "
                f"{self.multiple}; serve the model without quantization"
            )
        device = linear.weight.device
        linear.format = self
        weight = torch.empty((rows, columns), dtype=self.dtype, device=device)
        scale = torch.empty((rows, 1), dtype=torch.float32, device=device)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.weight_scale = nn.Parameter(scale, requires_grad=False)

    def add_product(self, linear: Linear, stream: torch.Tensor, x: torch.Tensor) -> None:
        """See `WeightFormat.add_product`."""
        stream += self.multiply(linear, x)

    def _unpack(self, linear: Linear, dtype: torch.dtype) -> None:
        """Turns the weight into plain numbers of `dtype`."""
        assert linear.weight_scale is not None
        plain = (linear.weight.float() * linear.weight_scale).to(dtype)
        linear.weight = nn.Parameter(plain, requires_grad=False)
        linear.weight_scale = None
