"""Turns a GGUF file into a Hugging Face folder, once, so that everything downstream loads one kind of model.

Quantised tensors are dequantised to float32 (by the `gguf` library); F16, BF16 and F32 keep their exact values.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from engine.config import ModelError
from engine.weights.gguf_header import check_header
from engine.weights.gguf_tokenizer import write_tokenizer

Progress = Callable[[float, str], None]
Array = npt.NDArray[np.float32]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Writes the model of `source` to `folder`, all or nothing. `progress(fraction, what)`. Raises ModelError."""
    check_header(source, _type_sizes)
    progress(0.0, "reading the header")
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"{source}: architecture {architecture!r} is not supported; {', '.join(_ARCHITECTURES)} are")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        weights, rope_factors = _weights(source, reader, fields, progress)
        progress(0.95, "writing")
        config = _config(source, fields, architecture, weights, rope_factors)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        write_tokenizer(source, fields, partial)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(1.0, "converted")


def _type_sizes(number: int) -> tuple[int, int, str]:
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise KeyError(number) from None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return block, size, kind.name


def _weights(
    source: Path, reader: Any, fields: dict[str, Any], progress: Progress
) -> tuple[dict[str, Array], list[float] | None]:
    """(tensors under their Hugging Face names, factors of `rope_freqs`)."""
    architecture = fields["general.architecture"]
    heads = fields[f"{architecture}.attention.head_count"]
    kv_heads = fields.get(f"{architecture}.attention.head_count_kv", heads)
    weights: dict[str, Array] = {}
    rope_factors = None
    for number, tensor in enumerate(reader.tensors):
        progress(0.1 + 0.85 * number / len(reader.tensors), tensor.name)
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"{source}: tensor {tensor.name} has type {tensor.tensor_type.name}, not supported"
            ) from None
        values = np.ascontiguousarray(values, dtype=np.float32)
        if tensor.name == "rope_freqs.weight":
            rope_factors = [float(value) for value in values]
            continue
        name, kind = tensor.name.rsplit(".", 1)
        if name in _TOP:
            weights[f"{_TOP[name]}.{kind}"] = values
            continue
        prefix, _, rest = name.partition(".")
        layer, _, module = rest.partition(".")
        if prefix != "blk" or module not in _BLOCK:
            raise ModelError(f"{source}: tensor {tensor.name} has no place in a {architecture} model")
        if architecture == "llama" and module in ("attn_q", "attn_k"):
            values = _unpermute(values, heads if module == "attn_q" else kv_heads)
        weights[f"model.layers.{layer}.{_BLOCK[module]}.{kind}"] = values
    return weights, rope_factors


def _unpermute(values: Array, heads: int) -> Array:
    """llama.cpp interleaves the two halves of each head's rows (only for arch llama); this undoes it."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _config(
    source: Path, fields: dict[str, Any], architecture: str, weights: dict[str, Array], rope_factors: list[float] | None
) -> dict[str, Any]:
    def need(name: str) -> Any:
        value = fields.get(f"{architecture}.{name}")
        if value is None:
            raise ModelError(f"{source}: the key {architecture}.{name} is missing")
        return value

    embedding = weights.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{source}: the tensor token_embd.weight is missing")
    heads = need("attention.head_count")
    head_dim = fields.get(f"{architecture}.attention.key_length", need("embedding_length") // heads)
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(embedding.shape[0]),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get(f"{architecture}.rope.freq_base", 10_000.0),
        "max_position_embeddings": need("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": architecture == "llama" and "model.layers.0.self_attn.o_proj.bias" in weights,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if rope_factors is not None:
        config["rope_scaling"] = {"rope_type": "factors", "factors": rope_factors}
    elif scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": need("rope.scaling.factor")}
    elif scaling != "none":
        raise ModelError(f"{source}: rope scaling {scaling!r} is not supported")
    return config
