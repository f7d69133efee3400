"""Turns a GGUF file into a Hugging Face folder, once, so that everything downstream loads one kind of model.

F32, F16 and BF16 tensors are copied as they are; quantised ones are dequantised to float32 by the `gguf` library.
Tensors go through memory a few rows at a time.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from engine.config import ModelError, parse_config
from engine.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf
from engine.weights.gguf_tokenizer import write_tokenizer

Progress = Callable[[float, str], None]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # names in both formats, bytes
_CHUNK = 4 << 20  # elements dequantised at once


class _Weight(msgspec.Struct, frozen=True):
    """A tensor on its way into the checkpoint."""

    name: str  # in the checkpoint
    source: GGUFTensor
    interleaved_heads: int = 0  # above 0: rows of each head are stored in pairs

    @property
    def dtype(self) -> str:
        """Type in the checkpoint."""
        return self.source.type.name if self.source.type.name in _FLOATS else "F32"

    @property
    def size(self) -> int:
        """Bytes in the checkpoint."""
        return int(np.prod(self.source.shape)) * _FLOATS[self.dtype]


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Writes the model of `source` to `folder`, which must not exist, all or nothing. Raises ModelError.

    `progress(fraction, what)`. The caller sees to it that no two processes convert to one folder at a time.
    """
    progress(0.0, "reading the header")
    file = read_gguf(source)
    architecture = file.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"{source}: architecture {architecture!r} is not supported; {', '.join(_ARCHITECTURES)} are")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left
    partial.mkdir(parents=True)
    try:
        config = _config(file, architecture)
        _write_json(partial / "config.json", config)
        tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
        _write_json(partial / "generation_config.json", tokens)
        write_tokenizer(file, partial)
        _write_weights(partial / "model.safetensors", file, _weights(file, architecture, config), progress)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(1.0, "converted")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def _weights(file: GGUFFile, architecture: str, config: dict[str, Any]) -> list[_Weight]:
    """All tensors with their checkpoint names."""
    # llama.cpp stores the rows of queries and keys interleaved, for this architecture only.
    interleaved = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if architecture != "llama":
        interleaved = {}
    weights = []
    for tensor in file.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name, _, kind = tensor.name.rpartition(".")
        prefix, _, rest = name.partition(".")
        layer, _, module = rest.partition(".")
        if name in _TOP:
            weights.append(_Weight(f"{_TOP[name]}.{kind}", tensor))
        elif prefix == "blk" and module in _BLOCK:
            heads = interleaved.get(module, 0)
            if heads and tensor.shape[0] % (2 * heads):
                raise ModelError(
                    f"{file.path}: tensor {tensor.name} of shape {list(tensor.shape)} has not {heads} heads"
                )
            weights.append(_Weight(f"model.layers.{layer}.{_BLOCK[module]}.{kind}", tensor, heads))
        else:
            raise ModelError(f"{file.path}: tensor {tensor.name} has no place in a {architecture} model")
    return weights


def _write_weights(path: Path, file: GGUFFile, weights: list[_Weight], progress: Progress) -> None:
    """A safetensors file: length of the header, header, tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.size
        header[weight.name] = {"dtype": weight.dtype, "shape": weight.source.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for weight in weights:
            progress(done / end, weight.source.name)
            _copy(file, weight, out)
            done += weight.size
        # On disk before the folder gets its name: after a power cut it is whole or absent.
        out.flush()
        os.fsync(out.fileno())


def _copy(file: GGUFFile, weight: _Weight, out: BinaryIO) -> None:
    """Writes one tensor, its rows in the order of the checkpoint."""
    rows: npt.NDArray[Any] = file.rows(weight.source)
    order = _row_order(len(rows), weight.interleaved_heads)
    for part in _chunks(order, max(1, _CHUNK * len(rows) * _FLOATS[weight.dtype] // weight.size)):
        values = rows[part]
        if weight.source.type.name not in _FLOATS:
            try:
                values = gguf.quants.dequantize(values, weight.source.type)
            except NotImplementedError:
                name, kind = weight.source.name, weight.source.type.name
                raise ModelError(f"{file.path}: tensor {name} has the type {kind}, which is not supported") from None
        out.write(np.ascontiguousarray(values).data)


def _row_order(num_rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Which stored row goes where: with `heads` the pairs (first half, second half) of each head are taken apart."""
    order = np.arange(num_rows)
    return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else order


def _chunks(order: npt.NDArray[np.int64], size: int) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The content of config.json, checked."""
    tensors = {tensor.name: tensor for tensor in file.tensors}

    def key(name: str, default: Any = None) -> Any:
        value = file.get(f"{architecture}.{name}", str if isinstance(default, str) else (int, float), default)
        if value is None:
            raise ModelError(f"{file.path}: the key {architecture}.{name} is missing")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.path}: the tensor token_embd.weight is missing")
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv", key("attention.head_count")),
        "head_dim": file.get(f"{architecture}.attention.key_length", int),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base", 10_000.0),
        "max_position_embeddings": key("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": [token for token in dict.fromkeys(ends) if token is not None] or None,
    }
    # A linear scaling without a factor is llama.cpp's way to say none.
    scaling = key("rope.scaling.type", "linear")
    factor = key("rope.scaling.factor", key("rope.scale_linear", 0.0)) if scaling == "linear" else 0.0
    if scaling not in ("none", "linear") or (factor not in (0.0, 1.0) and _ROPE_FACTORS in tensors):
        raise ModelError(f"{file.path}: rope scaling {scaling!r} is not supported; linear and {_ROPE_FACTORS} are")
    if _ROPE_FACTORS in tensors:
        factors = file.rows(tensors[_ROPE_FACTORS]).view(np.float32)
        config["rope_scaling"] = {"rope_type": "factors", "factors": factors.ravel().tolist()}
    elif factor not in (0.0, 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    parsed = parse_config(config, config["eos_token_id"], source=str(file.path))
    config["head_dim"] = parsed.head_dim
    if key("rope.dimension_count", parsed.head_dim) != parsed.head_dim:
        raise ModelError(f"{file.path}: rotary embedding of a part of each head is not supported")
    return config
