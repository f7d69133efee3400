"""Llama 2 and 3, SmolLM2 and everything that calls itself LlamaForCausalLM."""

from engine.layers.decoder import Decoder


class Llama(Decoder):
    """The plain decoder."""
