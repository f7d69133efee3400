"""Builds a model from a folder: safetensors shards mapped into memory and copied into fused parameters."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig, ModelError, read_config
from engine.layers.decoder import Decoder
from engine.models.registry import model_class

Progress = Callable[[float, str], None]


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dummy_seed: int | None = None,
    progress: Progress = lambda fraction, what: None,
) -> tuple[Decoder, ModelConfig]:
    """(model, config) of a Hugging Face folder, or with `dummy_seed` random weights for its config. Raises ModelError."""
    config = read_config(folder)
    family = model_class(config)
    with torch.device("meta"):
        model = family(config)
    model = model.to(dtype).to_empty(device=device).eval()
    if dummy_seed is not None:
        _randomise(model, dummy_seed)
    else:
        _fill(model, config, folder, progress)
    model.finish_loading(device)
    return model, config


def _randomise(model: Decoder, seed: int) -> None:
    """Seeded normal weights of a size that keeps activations tame; norms 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator)
            parameter.data.copy_(values)


def _fill(model: Decoder, config: ModelConfig, folder: Path, progress: Progress) -> None:
    parameters = dict(model.named_parameters())
    missing = {_Slot(name, None) for name in parameters}
    for name, parameter in list(parameters.items()):
        fused = [(source, slot) for source, (target, slot) in model.FUSED.items() if f".{target}." in name]
        if fused:
            missing.discard(_Slot(name, None))
            missing.update(_Slot(name, slot) for _, slot in fused)
    if config.tie_word_embeddings:
        missing.discard(_Slot("lm_head.weight", None))
    total = len(missing)
    for name, tensor in _tensors(folder):
        target = _target(model, name)
        if target is None or (config.tie_word_embeddings and target.name == "lm_head.weight"):
            continue
        parameter = parameters.get(target.name)
        if parameter is None:
            raise ModelError(f"{folder}: tensor {name!r} has no place in a {config.architecture}")
        view = _part(parameter.data, config, target)
        if tensor.shape != view.shape:
            raise ModelError(
                f"{folder}: tensor {name!r} has shape {tuple(tensor.shape)}, the configuration needs {tuple(view.shape)}"
            )
        view.copy_(tensor)
        missing.discard(target)
        progress(1 - len(missing) / total, name)
    if missing:
        names = ", ".join(sorted(_checkpoint_name(model, slot) for slot in missing)[:5])
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, such as {names}")


class _Slot(tuple[str, int | None]):
    """(parameter name, slot of a fused parameter or None)."""

    def __new__(cls, name: str, slot: int | None) -> "_Slot":
        return super().__new__(cls, (name, slot))

    @property
    def name(self) -> str:
        return self[0]

    @property
    def slot(self) -> int | None:
        return self[1]


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_TOP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def _target(model: Decoder, name: str) -> _Slot | None:
    """Where a checkpoint tensor goes; None for what is not a weight. Unknown names come back unchanged."""
    if name in _TOP:
        return _Slot(_TOP[name], None)
    if name.endswith("rotary_emb.inv_freq"):
        return None
    match = _LAYER.fullmatch(name)
    if match is None:
        return _Slot(name, None)
    layer, module, kind = match.groups()
    if module in model.FUSED:
        target, slot = model.FUSED[module]
        return _Slot(f"layers.{layer}.{target}.{kind}", slot)
    return _Slot(f"layers.{layer}.{model.RENAMED.get(module, module)}.{kind}", None)


def _checkpoint_name(model: Decoder, target: _Slot) -> str:
    """Inverse of `_target`, for messages."""
    for source, ours in _TOP.items():
        if ours == target.name:
            return source
    _, layer, rest = target.name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    names = {ours: source for source, ours in model.RENAMED.items()}
    names |= {f"{ours}/{slot}": source for source, (ours, slot) in model.FUSED.items()}
    return (
        f"model.layers.{layer}.{names.get(module if target.slot is None else f'{module}/{target.slot}', module)}.{kind}"
    )


def _part(parameter: torch.Tensor, config: ModelConfig, target: _Slot) -> torch.Tensor:
    """The rows of a fused parameter that belong to one projection."""
    if target.slot is None:
        return parameter
    if ".qkv." in target.name:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return parameter.split([q, kv, kv])[target.slot]
    return parameter.chunk(2)[target.slot]


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a folder's shards."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content: dict[str, Any] = json.loads(index.read_text())
        paths = sorted({folder / str(name) for name in content.get("weight_map", {}).values()})
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file")
    for path in paths:
        if path.parent != folder or not path.exists():
            raise ModelError(f"{path} is named in the index and missing")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged or cut off: {error}") from error
