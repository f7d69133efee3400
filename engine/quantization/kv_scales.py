"""Scales of the KV cache: what a checkpoint holds to bring each layer's keys and values into the range of FP8.

They are folded into the weights around the cache, so that neither kernels nor the cache know of them: keys are divided
and queries multiplied by one, values divided and outputs multiplied by the other. Rounded up to a power of two they
change no digit of a weight.
"""

import re

import torch

from engine.config import ModelError
from engine.layers.decoder import Decoder, DecoderLayer
from engine.layers.linear import Linear
from engine.quantization.places import SharedScalePlace
from engine.weights.place import Place

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_proj\.|attn\.)?([kv])_scale")


class KVScales:
    """Of each layer of a model the scales of keys and values; 1 where the checkpoint has none."""

    def __init__(self, num_layers: int, device: str) -> None:
        self._scales = torch.ones(num_layers, 2, 1, 1, device=device)

    def place(self, name: str, shape: tuple[int, ...]) -> Place | None:
        """Where the checkpoint's tensor goes; None: it is no scale of the KV cache."""
        found = _NAME.fullmatch(name)
        if found is None or found[2] not in (None, found[3]) or int(found[1]) >= len(self._scales):
            return None
        return SharedScalePlace(self._scales[int(found[1]), "kv".index(found[3])], stored_shape=shape)

    def fold_into(self, model: Decoder) -> None:
        """Changes loaded weights, before they are packed, and notes in `model.kv_scales` by what.

        Raises ModelError for a scale that is not positive.
        """
        exponents = []
        for number, (layer, scales) in enumerate(zip(model.layers, self._scales.flatten(1).tolist(), strict=True)):
            assert isinstance(layer, DecoderLayer)
            if not all(0 < scale < float("inf") for scale in scales):
                raise ModelError(f"layer {number} has KV scales {scales}, which must be positive numbers")
            powers = tuple(int(torch.tensor(scale).log2().ceil()) for scale in scales)
            exponents.append((powers[0], powers[1]))
            key, value = (2.0**power for power in powers)
            attention = layer.attention
            queries, keys, _ = attention.qkv.parts
            if attention.norms is not None:  # what a factor before them does, they undo
                attention.norms.query.weight *= key
                attention.norms.key.weight /= key
            else:
                _multiply_rows(attention.qkv, slice(0, queries), key)
                _multiply_rows(attention.qkv, slice(queries, queries + keys), 1 / key)
            _multiply_rows(attention.qkv, slice(queries + keys, None), 1 / value)
            _multiply_weight(attention.output, slice(None), value)
        model.kv_scales = tuple(exponents) if any(map(any, exponents)) else ()


def _multiply_rows(linear: Linear, rows: slice, factor: float) -> None:
    """Multiplies outputs of a linear layer."""
    _multiply_weight(linear, rows, factor)
    if linear.bias is not None:
        linear.bias[rows] *= factor


def _multiply_weight(linear: Linear, rows: slice, factor: float) -> None:
    scaled = linear.weight if linear.weight_scale is None else linear.weight_scale
    scaled[rows] *= factor
