"""Qwen3 dense: each head's query and key are normed; the head size is free of the hidden size."""

from engine.layers.decoder import Decoder


class Qwen3(Decoder):
    """Llama with normed queries and keys."""

    qk_norm = True
