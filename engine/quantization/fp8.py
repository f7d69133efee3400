"""FP8 (e4m3) weights and activations: each row of the weight and each token has a scale (Micikevicius et al., 2022)."""

import torch

from engine.layers.linear import Linear
from engine.quantization.format import QuantisedFormat, UnpackedFormat
from engine.quantization.rounding import round_rows


class Fp8(QuantisedFormat):
    """On CUDA devices of compute capability 8.9 and newer, in bfloat16: the tensor cores multiply in FP8.

    Few rows are bound by the reading of the weights, and keep their activations (`Linear`).
    """

    name = "fp8"
    dtype = torch.float8_e4m3fn
    multiple = 16  # what the library asks for

    def few_rows(self, device: torch.device) -> int:
        """See `WeightFormat.few_rows`. The library reads eight bits, too, and need not turn them into sixteen."""
        return 16

    def pack(self, linear: Linear) -> None:
        """The weight is multiplied as it lies."""

    def multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply`. Of infinities and NaN in a row of x the whole row of the product is NaN."""
        from engine.kernels.fp8 import round_tokens

        assert linear.weight_scale is not None
        rounded, scale = round_tokens(x)
        product: torch.Tensor = torch._scaled_mm(
            rounded,
            linear.weight.t(),
            scale,
            linear.weight_scale.t(),
            bias=linear.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return product


class Fp8Reference(UnpackedFormat):
    """On CPU: weights and tokens are rounded alike, but multiplied in the model's type, and take as much memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(Fp8.name, Fp8.dtype, dtype)

    def multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        return super().multiply(linear, self._rounded(x))

    def multiply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`; without packed weights it comes to `multiply`, which rounds."""
        return super().multiply_gated(linear, self._rounded(x) if linear.packed else x)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        rounded, scale = round_rows(x, self.dtype)
        return (rounded.float() * scale).to(x.dtype)
