"""What a model is, read from the `config.json` of a Hugging Face folder. Works without torch."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.quantization.stored import FormatName, stored_format


class ModelError(ValueError):
    """A model folder or file that cannot be served; the message names what is wrong and where."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched. `factors` divides each frequency by its own factor."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    quantization: FormatName | None = None  # of the linear layers' weights in the checkpoint


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`. Raises ModelError."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return parse_config(config, eos, source=str(folder / "config.json"))


def parse_config(config: dict[str, Any], eos: int | list[int] | None, *, source: str) -> ModelConfig:
    """A ModelConfig from the content of `config.json`. `source` is named in errors."""

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise ModelError(f"{source}: `{name}` must be a positive integer, not {value!r}")
        return value

    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ModelError(f"{source}: `architectures` must name one model class, not {architectures!r}")
    _refuse_unsupported(config, source)
    num_heads = size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads", num_heads)
    hidden_size = size("hidden_size")
    head_dim = size("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{source}: {num_heads} heads, {num_kv_heads} KV heads of size {head_dim} do not fit together")
    eos_token_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and token >= 0 for token in eos_token_ids):
        raise ModelError(f"{source}: `eos_token_id` must be a token id or a list of them, not {eos!r}")
    rope_theta, rope_scaling = _rope(config, head_dim, source)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(config.get("rms_norm_eps"), f"{source}: `rms_norm_eps`"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=size("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=tuple(eos_token_ids),
        quantization=_quantization(config.get("quantization_config"), source),
    )


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    """Raises ModelError for what would change the numbers and is not computed here."""
    mistral = str(config["architectures"][0]).startswith("Mistral") and config.get("sliding_window")
    if config.get("use_sliding_window") or mistral or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"{source}: only full attention is supported, no sliding window or other kinds of layer")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{source}: activation {config['hidden_act']!r} is not supported, only silu")


def _quantization(stored: Any, source: str) -> FormatName | None:
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise ModelError(f"{source}: `quantization_config` must be an object, not {stored!r}")
    try:
        return stored_format(stored)
    except ValueError as error:
        raise ModelError(f"{source}: `quantization_config`: {error}") from error


def _positive(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"{what} must be a positive number, not {value!r}")
    return float(value)


def _rope(config: dict[str, Any], head_dim: int, source: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). Newer folders keep both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise ModelError(f"{source}: `rope_parameters` and `rope_scaling` must be objects")
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"{source}: rotary embedding of a part of each head ({partial!r}) is not supported")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    theta = _positive(theta, f"{source}: `rope_theta`")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in _SCALING_NEEDS:
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; {', '.join(_SCALING_NEEDS)} are")
    if missing := [name for name in _SCALING_NEEDS[kind] if name not in scaling]:
        raise ModelError(f"{source}: rope scaling {kind} needs `{missing[0]}`")
    known = {name: scaling[name] for name in _SCALING_NEEDS[kind]}
    try:
        result = msgspec.convert({"kind": kind, **known}, RopeScaling)
    except msgspec.ValidationError as error:
        raise ModelError(f"{source}: rope scaling: {error}") from error
    for value in (result.factor, result.low_freq_factor, result.high_freq_factor, *result.factors):
        _positive(value, f"{source}: each factor of the rope scaling")
    if kind == "llama3" and result.low_freq_factor >= result.high_freq_factor:
        raise ModelError(f"{source}: rope scaling llama3 needs low_freq_factor below high_freq_factor")
    if kind == "factors" and len(result.factors) != head_dim // 2:
        raise ModelError(
            f"{source}: rope scaling has {len(result.factors)} factors, half the head size is {head_dim // 2}"
        )
    return theta, result


_SCALING_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order: its index's, or model.safetensors, or all. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: `weight_map` must map tensor names to file names")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names {outside[0]!r}, which is no file of its folder")
        paths = [folder / name for name in names]
    else:
        paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if missing := [path for path in paths if not path.is_file()]:
        raise ModelError(f"{missing[0]} is missing; {index.name} names it")
    return paths


def fingerprint(folder: Path, dtype: str, quantization: str = "auto") -> str:
    """Identity of configuration, weights and what is made of them: equal on every machine, other for other KV bytes.

    Of each tensor its name, type, shape, first, middle and last bytes count: cheap, and fine-tuning changes them.
    """
    digest = hashlib.sha256(f"tandem-model-3\0{dtype}\0{quantization}\0".encode())
    digest.update(json.dumps(_read_json(folder / "config.json"), sort_keys=True).encode())
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size - 8:
                raise ModelError(f"{path} is cut off: its header has {header_size} bytes, the file {size}")
            header = file.read(header_size)
            digest.update(f"\0{path.name}\0{size}\0".encode() + header)
            for start, end in _ranges(header, path):
                for place in sorted({start, max(start, (start + end - _SAMPLE) // 2), max(start, end - _SAMPLE)}):
                    file.seek(8 + header_size + place)
                    digest.update(file.read(min(_SAMPLE, end - start)))
    return digest.hexdigest()[:32]


_SAMPLE = 4096


def _ranges(header: bytes, path: Path) -> list[tuple[int, int]]:
    """Where the tensors lie behind the header of a safetensors file, in bytes."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return sorted((int(tensor["data_offsets"][0]), int(tensor["data_offsets"][1])) for tensor in tensors.values())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a malformed header: {error!r}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the folder is not a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
