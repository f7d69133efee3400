"""Weights of eight-bit integers on CUDA devices; activations keep their precision."""

import torch
from torch.nn import functional

from engine.layers.linear import Linear
from engine.quantization.format import QuantisedFormat

_MOST_ROWS = 1024  # from there on the unpacking of a weight is little beside the product


class Int8(QuantisedFormat):
    """Kernels of ours turn the weights into numbers of the model's type as they read them."""

    name = "int8"
    dtype = torch.int8
    includes_output = True

    def pack(self, linear: Linear) -> None:
        """The weight is read as it lies."""
        self.round(linear)

    def multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        assert linear.weight_scale is not None
        if x.shape[0] <= _MOST_ROWS and x.dtype != torch.float32:
            from engine.kernels.int8 import int8_product

            return int8_product(x, linear.weight, linear.weight_scale, linear.bias)
        product = functional.linear(x, linear.weight.to(x.dtype)).mul_(linear.weight_scale.flatten())
        return product if linear.bias is None else product.add_(linear.bias)
