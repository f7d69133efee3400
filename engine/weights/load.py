"""Builds a model from a folder: safetensors shards mapped into memory and copied into fused parameters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig, ModelError, read_config, weight_files
from engine.layers.decoder import Decoder
from engine.models.registry import model_class

Progress = Callable[[float, str], None]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dummy_seed: int | None = None,
    progress: Progress = lambda fraction, what: None,
) -> tuple[Decoder, ModelConfig]:
    """(model, config) of a Hugging Face folder; with `dummy_seed` random weights for its config. Raises ModelError."""
    config = read_config(folder)
    family = model_class(config)
    with torch.device("meta"):
        model = family(config)
    model = model.to(dtype).to_empty(device=device).eval()
    if dummy_seed is not None:
        _randomise(model, dummy_seed)
    else:
        _fill(model, folder, progress)
    model.finish_loading(device)
    return model, config


def _randomise(model: Decoder, seed: int) -> None:
    """Seeded normal weights of a size that keeps activations tame; norms 1."""
    weights = model.weights()
    device = next(iter(weights.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        else:
            drawn = torch.empty(weight.shape, dtype=torch.float32, device=device).normal_(0, 0.02, generator=generator)
            weight.copy_(drawn)


def _fill(model: Decoder, folder: Path, progress: Progress) -> None:
    """Copies each tensor of the folder to its place; every place must be filled, once, by a tensor of its shape."""
    missing = model.weights()
    total = len(missing)
    for path, name, tensor in _tensors(folder):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        place = missing.pop(name, None)
        if place is None:
            raise ModelError(f"{path}: tensor {name} has no place in a {model.config.architecture}, or comes twice")
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} has type {tensor.dtype}; float32, bfloat16 and float16 are supported"
            )
        if tensor.shape != place.shape:
            shapes = f"{list(tensor.shape)}, the configuration needs {list(place.shape)}"
            raise ModelError(f"{path}: tensor {name} has shape {shapes}")
        place.copy_(tensor)
        progress(1 - len(missing) / total, name)
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, such as {', '.join(sorted(missing)[:3])}")


def _tensors(folder: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """(file, name, tensor) of all shards of a folder."""
    paths = weight_files(folder)
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield path, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut off: {error}") from error
