"""Builds a model from a folder: each tensor of its safetensors files goes to its place in the fused parameters."""

from pathlib import Path
from typing import Any, cast

import torch

from engine.config import ModelConfig, ModelError, read_config, weight_files
from engine.layers.decoder import Decoder
from engine.memory import require_weights
from engine.models.registry import model_class
from engine.parallel.group import ALONE, Group, rank_config
from engine.quantization.choose import quantise, require_fp8, weight_format
from engine.quantization.kv_scales import KVScales
from engine.quantization.places import is_unused_scale, rounded_places, scale_place, weight_scale_name
from engine.weights.place import Place
from engine.weights.read import Progress, read_tensors
from engine.weights.safetensors_file import StoredTensor, stored_tensors


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantization: str = "auto",
    kv_fp8: bool = False,
    dummy_seed: int | None = None,
    group: Group = ALONE,
    progress: Progress = lambda done, total, name: None,
) -> tuple[Decoder, ModelConfig]:
    """(model, config) of a Hugging Face folder; with `dummy_seed` random weights for its config.

    Raises ModelError, or DoesNotFit for more weights than a CUDA device has room for.

    Both are what one rank of `group` has. `kv_fp8`: prepared for a KV cache in FP8.
    """
    config = rank_config(read_config(folder), group.size)
    family = model_class(config)
    with torch.device("meta"):
        model = family(config, group)
    model = model.to(dtype)
    if kv_fp8:
        require_fp8(device)
    if (chosen := weight_format(config.quantization, quantization, dtype, device)) is not None:
        quantise(model, chosen)
    if torch.device(device).type == "cuda":
        require_weights(sum(weight.nbytes for weight in model.parameters()), *torch.cuda.mem_get_info(device))
    # As `to_empty`, which asks a meta tensor for its like, and so imports sympy: a second of a worker's start.
    cast(Any, model)._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))
    model.eval()
    if dummy_seed is not None:
        _randomise(rounded_places(model.places()), dummy_seed)
    else:
        scales = KVScales(config.num_layers, device) if kv_fp8 else None
        read_tensors(_places(model, folder, scales), progress)
        if scales is not None:
            scales.fold_into(model)
    model.finish_loading(device)
    return model, config


def _randomise(places: dict[str, Place], seed: int) -> None:
    """Seeded normal weights of a size that keeps activations tame; norms 1."""
    device = next(iter(places.values())).destination.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        if name.endswith("norm.weight"):
            drawn = torch.ones(place.shape, device=device)
        else:
            drawn = torch.empty(place.shape, device=device).normal_(0, 0.02, generator=generator)
        place.put(place.rows.start, drawn[place.rows.start : place.rows.stop])


def _places(model: Decoder, folder: Path, scales: KVScales | None) -> list[tuple[StoredTensor, Place]]:
    """Each tensor of the folder and its place; every place must be filled, once, by a tensor of its shape."""
    paths = weight_files(folder)
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file")
    quantised = model.config.quantization is not None
    missing = model.places() if quantised else rounded_places(model.places())
    pairs = []
    for tensor in (tensor for path in paths for tensor in stored_tensors(path)):
        what = f"{tensor.path}: tensor {tensor.name}"
        if scales is not None and (scale := scales.place(tensor.name, tensor.shape)) is not None:
            pairs.append((tensor, scale))
            continue
        ignored = tensor.name == "lm_head.weight" and model.config.tie_word_embeddings
        if ignored or tensor.name.endswith("rotary_emb.inv_freq") or is_unused_scale(tensor.name):
            continue
        name = weight_scale_name(tensor.name)
        place = missing.pop(name, None)
        if place is None:
            raise ModelError(f"{what} has no place in a {model.config.architecture}, or comes twice")
        if name.endswith(".weight_scale"):
            place = scale_place(place, tensor.shape)
        if tensor.dtype not in place.dtypes:
            raise ModelError(
                f"{what} has type {tensor.dtype}; here it must be one of {', '.join(map(str, place.dtypes))}"
            )
        if tensor.shape != place.shape:
            raise ModelError(f"{what} has shape {list(tensor.shape)}, the configuration needs {list(place.shape)}")
        pairs.append((tensor, place))
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, such as {', '.join(sorted(missing)[:3])}")
    return pairs
