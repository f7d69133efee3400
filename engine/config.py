"""What a model is, read from the `config.json` of a Hugging Face folder. Works without torch."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Literal

import msgspec


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


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`. Raises ModelError."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return parse_config(config, eos, source=str(folder / "config.json"))


def parse_config(config: dict[str, Any], eos: int | list[int] | None, *, source: str) -> ModelConfig:
    """A ModelConfig from the content of `config.json`. `source` is named in errors."""

    def need(name: str, kind: type[int] | type[float] = int) -> Any:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(f"{source}: `{name}` must be a positive number, not {value!r}")
        return kind(value)

    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ModelError(f"{source}: `architectures` must name one model class, not {architectures!r}")
    if config.get("use_sliding_window") or (config.get("sliding_window") and architectures[0].startswith("Mistral")):
        raise ModelError(f"{source}: sliding-window attention is not supported")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{source}: activation {config['hidden_act']!r} is not supported, only silu")
    num_heads = need("num_attention_heads")
    num_kv_heads = need("num_key_value_heads") if config.get("num_key_value_heads") else num_heads
    hidden_size = need("hidden_size")
    head_dim = need("head_dim") if config.get("head_dim") else hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{source}: {num_heads} heads, {num_kv_heads} KV heads of size {head_dim} do not fit together")
    rope = _rope(config, source)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=need("rms_norm_eps", float),
        rope_theta=rope[0],
        rope_scaling=rope[1],
        max_position_embeddings=need("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _rope(config: dict[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). Newer folders keep both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "factors"):
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; linear, llama3 and factors are")
    known = {name: scaling[name] for name in RopeScaling.__struct_fields__ if name in scaling}
    try:
        return theta, msgspec.convert({"kind": kind, **known}, RopeScaling, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{source}: rope scaling: {error}") from error


def fingerprint(folder: Path, dtype: str) -> str:
    """Identity of configuration, weights and dtype: equal on every machine, other for other KV bytes.

    Weight files count by size, header and their first and last MiB, which is cheap and tells any two real models apart.
    """
    digest = hashlib.sha256(f"tandem-model-1\0{dtype}\0".encode())
    digest.update(json.dumps(_read_json(folder / "config.json"), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            start = file.read(8)
            header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            digest.update(start + file.read(min(header, 64 << 20) + (1 << 20)))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:32]


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
