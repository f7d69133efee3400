"""Rotary position embedding (Su et al., 2021), half-split layout, with the scalings of Llama 3."""

import math

import torch

from engine.config import ModelConfig


class Rotary:
    """Precomputed cosines and sines for all positions of a model."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config))  # [positions, head_dim / 2]
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [N, 1, head_dim] of positions int64 [N], for `rotate`."""
        cos, sin = self._cos[positions].to(dtype), self._sin[positions].to(dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [N, heads, head_dim] rotated by its position; `sin` carries the sign of the first half."""
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
