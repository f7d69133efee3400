"""A tiny model with the default model's tokenizer, so that hundreds of requests take seconds."""

import json
import shutil
from pathlib import Path

from engine.weights.resolve import resolve

# Prompts are computed many times slower than their KV, which stays as small, comes from elsewhere, as of real models.
SLOW: dict[str, object] = {"intermediate_size": 16_384}


def tiny_model(folder: Path, **changes: object) -> Path:
    """Configuration, with `changes`, and tokenizer only: to be run with --dummy-seed."""
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve()
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config | changes))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    return folder
