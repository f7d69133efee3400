"""Rotary position embedding (Su et al., 2021), half-split layout, with the scalings of Llama 3."""

import math
from functools import cached_property

import torch
from torch import nn

from engine.config import ModelConfig


class Rotary(nn.Module):
    """Precomputed cosines and sines for all positions of a model."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, device: str) -> None:
        super().__init__()
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config))  # [positions, head_dim / 2]
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> "Rotation":
        """The rotation of N tokens at positions int [N]."""
        return Rotation(self.cos, self.sin, positions, dtype)


class Rotation:
    """Rotates the heads of a step's tokens. `cos`, `sin` float32 [all positions, head_dim / 2]; `positions` int [N]."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self.cos = cos
        self.sin = sin
        self.positions = positions
        self._dtype = dtype

    @cached_property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, 1, head_dim] each; the second carries the sign of the first half."""
        cos, sin = self.cos[self.positions].to(self._dtype), self.sin[self.positions].to(self._dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, heads, head_dim], each token turned by its position."""
        cos, sin = self._factors
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half])
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2], scaled as the configuration says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    # Llama 3.1: long waves are stretched, short ones kept, those between blended.
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    smooth = ((context / waves - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
