"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    weight: torch.Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def add(self, x: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
        """Adds x [N, size] to the residual stream, in place, and returns the stream normed."""
        if stream.is_cuda:
            from engine.kernels.norm import add_rms_norm

            return add_rms_norm(x, stream, self.weight, self.eps)
        if x is not None:
            stream += x
        normed: torch.Tensor = self(stream)
        return normed
