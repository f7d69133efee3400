"""Qwen2 and Qwen2.5: biases on query, key and value."""

from engine.layers.decoder import Decoder


class Qwen2(Decoder):
    """Llama with biased query, key and value projections."""

    qkv_bias = True
