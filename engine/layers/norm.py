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
        self._eps = torch.tensor(eps, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same."""
        if x.is_cuda:
            from engine.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if x.dtype != torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # The same in half as many operations: between products of weights, each finds its code and data uncached.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(self.weight)
