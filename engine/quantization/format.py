"""What the quantised formats share."""

import torch
from torch import nn

from engine.config import ModelError
from engine.layers.linear import Linear, WeightFormat
from engine.quantization.rounding import round_rows

_ROUNDED_AT_ONCE = 8192  # rows, for the memory that it takes


class QuantisedFormat(WeightFormat):
    """Weights of one byte, with a scale for each row."""

    name = ""  # in the configuration, and part of the identity of a model
    dtype = torch.int8
    multiple = 1  # both sizes of a weight must be multiples of this
    includes_output = False  # whether the model's output layer is rounded, too, if the checkpoint has floats

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

    def round(self, linear: Linear) -> None:
        """Rounds a weight that was loaded as floats, such as one that is the embedding's, too."""
        if linear.weight_scale is None:
            pieces = [round_rows(rows, self.dtype) for rows in torch.split(linear.weight.detach(), _ROUNDED_AT_ONCE)]
            linear.weight = nn.Parameter(torch.cat([rows for rows, _ in pieces]), requires_grad=False)
            linear.weight_scale = nn.Parameter(torch.cat([scale for _, scale in pieces]), requires_grad=False)


class UnpackedFormat(QuantisedFormat):
    """Weights that are rounded when loaded, and then kept and multiplied as numbers of the model's type."""

    def __init__(self, name: str, rounded: torch.dtype, dtype: torch.dtype) -> None:
        """`rounded` to, and the model's `dtype`."""
        self.name = name
        self.dtype = rounded
        self._dtype = dtype

    def pack(self, linear: Linear) -> None:
        """See `WeightFormat.pack`."""
        assert linear.weight_scale is not None
        plain = (linear.weight.float() * linear.weight_scale).to(self._dtype)
        linear.weight = nn.Parameter(plain, requires_grad=False)
        linear.weight_scale = None
        super().pack(linear)
