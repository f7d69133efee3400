"""GGUF files: what converts, to which numbers, and what is refused."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from engine.attention.base import AttentionContext
from engine.config import ModelError, RopeScaling, read_config
from engine.layers.rotary import inverse_frequencies
from engine.text.tokenizer import Tokenizer
from engine.weights.gguf_convert import convert
from engine.weights.gguf_file import read_gguf
from engine.weights.load import load_model

F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GLYPHS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<unk>", "<s>", "</s>", "<eot>", "<tool>", *GLYPHS, "ab", "abc"]
TYPES = [2, 3, 3, 3, 4] + [1] * (len(TOKENS) - 5)
TOKENS += [f"[PAD{i}]" for i in range(512 - len(TOKENS))]
TYPES += [5] * (512 - len(TYPES))


def gguf_name(name: str) -> str:
    """GGUF name of a checkpoint's tensor."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores the rows of q and k of a Llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    *,
    matrix_type: gguf.GGMLQuantizationType = F32,
    rope_factors: np.ndarray | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """The model of a Hugging Face folder as a GGUF file, as llama.cpp's converter would write it.

    `raw` replaces tensors by bytes of some type, `keys` replaces keys (None: leaves one out), `without` leaves
    tensors out.
    """
    config = read_config(folder)
    defaults: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    values = {f"{architecture}.{name}": value for name, value in defaults.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values | (keys or {})).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, (bool, str, float)):
            {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}[type(value)](key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours = gguf_name(name)
        if architecture == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            tensor = interleave(tensor, config.num_heads if ".attn_q." in ours else config.num_kv_heads)
        kind = matrix_type if tensor.ndim == 2 else F32
        data = gguf.quants.quantize(tensor, kind)
        if ours in (raw or {}):
            data, kind = raw[ours]
        if ours not in without:
            writer.add_tensor(ours, data, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(source: Path) -> Path:
    folder = source.with_suffix("")
    convert(source, folder, lambda fraction, what: None)
    return folder


class DenseCausal(AttentionContext):
    """Attention over one sequence from position 0, without a cache."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


def logits(folder: Path) -> torch.Tensor:
    """Of 300 fixed tokens, [300, vocab]."""
    model, config = load_model(folder)
    tokens = torch.randint(3, config.vocab_size, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.logits(model.forward(tokens, torch.arange(300), DenseCausal()))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_weights_come_back_exactly(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    original = request.getfixturevalue(f"{family}_folder")
    folder = converted(write_gguf(tmp_path / "m.gguf", original, family))
    expected, ours = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(ours[name], expected[name]) for name in expected)
    assert read_config(folder).tie_word_embeddings == (family == "qwen3")
    assert torch.equal(logits(folder), logits(original))


def test_llama_with_stretched_rope(llama_folder: Path, tmp_path: Path) -> None:
    """Rows of q and k go back to their places, tied embeddings stay tied, `rope_freqs` counts."""
    config = read_config(llama_folder)
    plain = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    factors = (plain / inverse_frequencies(config)).numpy()
    assert factors.max() > 7 and factors.min() == pytest.approx(1)
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", rope_factors=factors))
    expected, ours = load_file(llama_folder / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == expected.keys() and "lm_head.weight" not in ours
    assert all(np.array_equal(ours[name], expected[name]) for name in expected)
    torch.testing.assert_close(logits(folder), logits(llama_folder), atol=3e-4, rtol=1e-3)
    ignored = converted(write_gguf(tmp_path / "n.gguf", llama_folder, "llama"))
    assert not torch.allclose(logits(ignored)[200:], logits(llama_folder)[200:], atol=1e-2)


def test_linear_rope_scaling(llama_folder: Path, tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", keys=keys))
    assert read_config(folder).rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize("kind", [F16, BF16])
def test_half_precision_is_copied(kind: Any, llama_folder: Path, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", matrix_type=kind))
    dtype = {F16: torch.float16, BF16: torch.bfloat16}[kind]
    name = "model.layers.1.self_attn.q_proj.weight"
    with (
        safe_open(folder / "model.safetensors", "pt") as ours,
        safe_open(llama_folder / "model.safetensors", "pt") as original,
    ):
        assert ours.get_tensor(name).dtype == dtype
        assert torch.equal(ours.get_tensor(name), original.get_tensor(name).to(dtype))
        assert ours.get_tensor("model.norm.weight").dtype == torch.float32
    load_model(folder)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_rows_are_dequantised_in_their_order(kind: str, llama_folder: Path, tmp_path: Path) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", matrix_type=quantised))
    original = load_file(llama_folder / "model.safetensors")
    ours = load_file(folder / "model.safetensors")
    for name, tensor in original.items():
        if tensor.ndim == 2:
            tensor = gguf.quants.dequantize(gguf.quants.quantize(tensor, quantised), quantised)
        assert np.array_equal(ours[name], tensor), name


def test_iq_types(llama_folder: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ4_NL  # blocks of 32, so that it fits the tiny rows
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 60, (64, 160 // block * size), dtype=np.uint8)
    raw = {"blk.0.ffn_down.weight": (data, kind)}
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", raw=raw))
    ours = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(ours, gguf.quants.dequantize(data, kind))


def test_tokenizer(llama_folder: Path, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama"))
    ours = Tokenizer.from_folder(folder)
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")
    assert ours.special_ids == {1, 2, 3}
    digit = TOKENS.index
    assert ours.encode("abc12") == [1, digit("abc"), digit("1"), digit("2")]
    assert ours.encode_template("<tool>ab</s>") == [4, digit("ab"), 2]
    assert ours.decode(ours.encode("naïve 東京")) == "naïve 東京"
    standard = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert standard.encode("abc").ids == [1, digit("abc")]
    assert read_config(folder).eos_token_ids == (2, 3)
    assert (folder / "chat_template.jinja").read_text() == "{{ bos_token }}{{ messages[0].content }}"
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2, 3]}


@pytest.mark.parametrize(
    ("pre", "flag", "expected"), [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)]
)
def test_whether_bos_comes_first(pre: str, flag: Any, expected: bool, llama_folder: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    folder = converted(write_gguf(tmp_path / "m.gguf", llama_folder, "llama", keys=keys))
    assert (Tokenizer.from_folder(folder).encode("a")[0] == 1) == expected


REFUSED = {
    "architecture 'gemma3'": {"architecture": "gemma3"},
    "pre-tokenizer 'tekken'": {"keys": {"tokenizer.ggml.pre": "tekken"}},
    "tokenizer 'llama'": {"keys": {"tokenizer.ggml.model": "llama"}},
    "rope scaling 'yarn'": {"keys": {"llama.rope.scaling.type": "yarn"}},
    "part of each head": {"keys": {"llama.rope.dimension_count": 8}},
    "join them with": {"keys": {"split.count": 2}},
    "llama.block_count is missing": {"keys": {"llama.block_count": None}},
    "llama.attention.head_count has a value of the wrong type": {"keys": {"llama.attention.head_count": [4, 4, 4]}},
    "general.architecture has a value of the wrong type": {"keys": {"general.architecture": [1, 2]}},
    "chat_template has a value of the wrong type": {"keys": {"tokenizer.chat_template": 7}},
    "512 tokens have 2 types": {"keys": {"tokenizer.ggml.token_type": [1, 1]}},
    "merges do not fit": {"keys": {"tokenizer.ggml.merges": ["nobody knows"]}},
    "token_embd.weight is missing": {"without": ("token_embd.weight",)},
    "blk.0.ffn_up.weight has the type I8": {
        "raw": {"blk.0.ffn_up.weight": (np.zeros((160, 64), np.int8), gguf.GGMLQuantizationType.I8)}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_named(message: str, llama_folder: Path, tmp_path: Path) -> None:
    options = dict(REFUSED[message])
    source = write_gguf(tmp_path / "m.gguf", llama_folder, **{"architecture": "llama"} | options)
    with pytest.raises(ModelError, match=message) as caught:
        converted(source)
    assert "m.gguf" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [source]  # nothing half done


def test_a_missing_layer_is_named_at_loading(llama_folder: Path, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", llama_folder, "llama", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"1 tensors are missing, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(converted(source))


def test_what_a_killed_conversion_left_is_no_obstacle(qwen3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "model.safetensors").write_bytes(b"half")
    folder = converted(write_gguf(tmp_path / "m.gguf", qwen3_folder, "qwen3"))
    load_model(folder)
    assert not (tmp_path / "m.partial").exists()


def test_every_truncation_is_an_error(qwen3_folder: Path, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", qwen3_folder, "qwen3").read_bytes()
    last = max(tensor.offset + tensor.size for tensor in read_gguf(tmp_path / "m.gguf").tensors)
    cut = tmp_path / "cut.gguf"
    places = random.Random(1)
    for end in [0, 3, 4, 23, 24, last - 1, *(places.randrange(last) for _ in range(100))]:
        cut.write_bytes(data[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def header_places(data: bytes) -> dict[str, int]:
    """Where some counts stand in a file that `write_gguf` wrote."""
    key = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")  # then: type, item type, count, strings
    tensor = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight")  # then: dims, shape, type, offset
    return {
        "tensors": 8,
        "keys": 16,
        "length of a key": 24,
        "items of an array": key + 8,
        "length of a string": key + 16,
        "shape": tensor + 4,
        "offset": tensor + 4 + 16 + 4,
    }


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1, 1 << 40, 1 << 61])
def test_absurd_numbers_are_refused_before_anything_is_allocated(
    value: int, qwen3_folder: Path, tmp_path: Path
) -> None:
    data = write_gguf(tmp_path / "m.gguf", qwen3_folder, "qwen3").read_bytes()
    for what, place in header_places(data).items():
        (tmp_path / "bad.gguf").write_bytes(data[:place] + struct.pack("<Q", value) + data[place + 8 :])
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            read_gguf(tmp_path / "bad.gguf")
            pytest.fail(what)


def test_damaged_headers_raise_nothing_else(qwen3_folder: Path, tmp_path: Path) -> None:
    """Random bytes anywhere in the header: the file converts or is refused with a message."""
    data = write_gguf(tmp_path / "m.gguf", qwen3_folder, "qwen3").read_bytes()
    end = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors)
    chance = random.Random(2)
    refused = 0
    for number in range(150):
        bad = bytearray(data)
        for _ in range(chance.choice((1, 1, 4, 30))):
            bad[chance.randrange(4, end)] = chance.choice((0, 1, 9, 255, chance.randrange(256)))
        source = tmp_path / f"bad{number}.gguf"
        source.write_bytes(bad)
        try:
            converted(source)
        except ModelError as error:
            refused += 1
            assert source.name in str(error)
        finally:
            source.unlink()
    assert 30 < refused < 150
