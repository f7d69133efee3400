"""Shapes of models that are planned for by name, as their makers' `config.json` have them."""

from engine.config import ModelConfig


def _shape(
    architecture: str,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: int,
    *,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
    )


_LLAMA, _QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"

SHAPES = {
    "llama-1b": _shape(_LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, 131_072, tied=True),  # Llama 3.2
    "llama-3b": _shape(_LLAMA, 128_256, 3072, 8192, 28, 24, 8, 128, 131_072, tied=True),  # Llama 3.2
    "llama-8b": _shape(_LLAMA, 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072),  # Llama 3.1
    "llama-70b": _shape(_LLAMA, 128_256, 8192, 28_672, 80, 64, 8, 128, 131_072),  # Llama 3.1
    "qwen3-0.6b": _shape(_QWEN, 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, tied=True),
    "qwen3-8b": _shape(_QWEN, 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960),
    "qwen3-32b": _shape(_QWEN, 151_936, 5120, 25_600, 64, 64, 8, 128, 40_960),
}
