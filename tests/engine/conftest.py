"""Tiny seeded model folders, one per family, made with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save(folder: Path, family: str, **changes: Any) -> Path:
    """A seeded model of `family` ("Llama", "Qwen2", "Qwen3") in `folder`."""
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**SHAPE | changes)
    model = getattr(transformers, family + "ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "Llama", rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen2"), "Qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen3"), "Qwen3", head_dim=32, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def biased_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with a bias in every projection, and four KV heads."""
    return save(tmp_path_factory.mktemp("biased"), "Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4)
