"""Folders and names that users give: what loads, what is refused, what counts as the same model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelError, RopeScaling, fingerprint, parse_config, read_config
from engine.weights.load import load_model
from engine.weights.place import Place
from engine.weights.read import read_tensors
from engine.weights.resolve import DEFAULT_MODEL, model_name, resolve
from engine.weights.safetensors_file import stored_tensors


def copy(source: Path, folder: Path, **config: object) -> Path:
    """`source` in `folder`, with changes of its configuration."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})


def split_into_shards(folder: Path) -> dict[str, str]:
    """Turns model.safetensors into two shards with an index; gives the index's map."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {
        name: f"model-0000{1 + (number > len(names) // 2)}-of-00002.safetensors" for number, name in enumerate(names)
    }
    for shard in set(shards.values()):
        save({name: weights[name] for name in names if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return shards


def test_shards_load_as_one_file_does(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    split_into_shards(folder)
    seen: list[tuple[int, int, str]] = []
    ours, _ = load_model(folder, progress=lambda *step: seen.append(step))
    expected, _ = load_model(qwen2_folder)
    tokens = torch.arange(40)
    x, y = ours.embedding(tokens), expected.embedding(tokens)
    for a, b in zip(ours.layers, expected.layers, strict=True):
        a.mlp(a.post_norm, x)
        b.mlp(b.post_norm, y)
    assert torch.equal(ours.logits(x), expected.logits(y))
    dones, totals, names = zip(*seen, strict=True)
    expected_bytes = sum(weight.nbytes for weight in load_file(qwen2_folder / "model.safetensors").values())
    assert list(dones) == sorted(dones) and (dones[0], dones[-1]) == (0, expected_bytes)
    assert set(totals) == {expected_bytes} and set(names) == set(load_file(qwen2_folder / "model.safetensors"))


def test_shards_that_are_missing_or_outside(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    shards = split_into_shards(folder)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": shards | {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match=r"'\.\./elsewhere\.safetensors', which is no file of its folder"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": 7}))
    with pytest.raises(ModelError, match="weight_map"):
        load_model(folder)
    index.write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_model(folder)


def test_no_weights(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        load_model(folder)


def test_tensors_that_do_not_fit(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    path, weights = folder / "model.safetensors", load_file(qwen2_folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save({other: weights[other] for other in weights if other != name}, path)
    with pytest.raises(ModelError, match=r"1 tensors are missing, such as model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(folder)
    save(weights | {name: weights[name][:-1]}, path)
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[31, 64\], the configuration needs \[32, 64\]"):
        load_model(folder)
    save(weights | {name: weights[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ModelError, match=r"k_proj\.weight has type torch\.float8_e4m3fn"):
        load_model(folder)
    save(weights | {"model.layers.3.mlp.up_proj.weight": weights["model.layers.1.mlp.up_proj.weight"].clone()}, path)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight has no place"):
        load_model(folder)


def test_cut_off_and_garbage_files(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for content in (data[:-1], data[: len(data) // 2], data[:100], b"", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut off"):
            load_model(folder)


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_with_header(path: Path, header: str, content: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 1 << 60]}, "damaged or cut off: tensor model.norm.weight does not lie"),
        ({"data_offsets": [8, 16]}, "damaged or cut off: tensor .* does not lie"),
        ({"data_offsets": ["0", "8"]}, "damaged or cut off: offsets"),
        ({"data_offsets": [0]}, "damaged or cut off"),
        ({"shape": [64, -1]}, r"damaged or cut off: tensor model.norm.weight has the shape \[64, -1\]"),
        ({"shape": 7}, "damaged or cut off"),
        ({"dtype": "F4"}, "tensor model.norm.weight has the unknown type 'F4'"),
        ({"dtype": ["F32"]}, "damaged or cut off"),
    ],
)
def test_headers_that_lie(qwen2_folder: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    path = folder / "model.safetensors"
    header, content = header_of(path)
    header["model.norm.weight"] |= change
    write_with_header(path, json.dumps(header), content)
    with pytest.raises(ModelError, match=message):
        load_model(folder)
    text = json.dumps(header_of(qwen2_folder / "model.safetensors")[0])
    for header_text in (text.replace("model.norm.weight", "lm_head.weight"), "[]", "7", text[:-1], '{"a":' * 50_000):
        write_with_header(path, header_text, content)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut off"):
            load_model(folder)


def test_a_tensor_in_two_files(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen2_folder, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save({"model.norm.weight": torch.zeros(64)}, folder / "b.safetensors")
    with pytest.raises(ModelError, match=r"b\.safetensors: tensor model\.norm\.weight has no place .* or comes twice"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_take_parts_of_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Along either dimension and through many pieces, with the type converted or not."""
    weight = torch.arange(3000 * 1700, dtype=torch.float32).view(3000, 1700) % 251  # 20 MB; exact in bfloat16
    save({"a": weight, "b": weight[0].clone()}, tmp_path / "f.safetensors")
    a, b = stored_tensors(tmp_path / "f.safetensors")
    whole, rows, columns, short = (
        torch.full(shape, -1, dtype=dtype) for shape in ((3000, 1700), (2000, 1700), (3000, 800), (100,))
    )
    pairs = [
        (a, Place(whole)),
        (a, Place(rows, 0, 900, 3000)),
        (a, Place(columns, 1, 900, 1700)),
        (b, Place(short, 0, 1600, 1700)),
    ]
    assert [tensor.shape for tensor, _ in pairs] == [place.shape for _, place in pairs]
    read_tensors(pairs, lambda done, total, name: None)
    assert torch.equal(whole.float(), weight)
    assert torch.equal(rows.float(), weight[900:2900])
    assert torch.equal(columns.float(), weight[:, 900:])
    assert torch.equal(short.float(), weight[0, 1600:])


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save({"a": torch.ones(3000, 1700), "b": torch.ones(7)}, path)
    tensors = stored_tensors(path)
    os.truncate(path, 15_000_000)
    pairs = [(tensor, Place(torch.empty(tensor.shape))) for tensor in tensors]
    with pytest.raises(ModelError, match=r"f\.safetensors cannot be read at tensor a: the file ends too early"):
        read_tensors(pairs, lambda done, total, name: None)
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot be read at tensor a: .*No such file"):
        read_tensors(pairs, lambda done, total, name: None)


def test_types_are_cast_on_loading(qwen3_folder: Path, tmp_path: Path) -> None:
    folder = copy(qwen3_folder, tmp_path / "m")
    weights = load_file(qwen3_folder / "model.safetensors")
    save({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    model, _ = load_model(folder)
    assert torch.equal(model.embedding.weight, weights["model.embed_tokens.weight"].bfloat16().float())
    half, _ = load_model(folder, dtype=torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16
    assert half.logits(torch.ones(3, 64, dtype=torch.bfloat16)).shape == (3, 512)


def test_dummy_weights_need_no_files_and_are_seeded(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copy(llama_folder / "config.json", tmp_path)
    first, again, other = (load_model(tmp_path, dummy_seed=seed)[0] for seed in (3, 3, 4))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.layers[2].mlp.gate_up(x), again.layers[2].mlp.gate_up(x))
    assert torch.equal(first.logits(x), again.logits(x))
    assert not torch.equal(first.logits(x), other.logits(x))
    assert first.logits(x).isfinite().all()


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_both_ways_to_write_rope() -> None:
    old = CONFIG | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}
    new = CONFIG | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    config = parse_config(old, 2, source="c")
    assert config == parse_config(new, [2], source="c")
    assert config.rope_theta == 5e5 and config.rope_scaling == RopeScaling(kind="llama3", **LLAMA3)
    assert (config.num_kv_heads, config.head_dim, config.eos_token_ids) == (4, 16, (2,))
    assert parse_config(CONFIG, None, source="c").rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "`architectures` must name one model class"),
        ({"hidden_size": -1}, "`hidden_size` must be a positive integer, not -1"),
        ({"hidden_size": 64.5}, "`hidden_size`"),
        ({"vocab_size": True}, "`vocab_size`"),
        ({"num_hidden_layers": None}, "`num_hidden_layers`"),
        ({"num_key_value_heads": 3}, "do not fit together"),
        ({"head_dim": 15}, "do not fit together"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a positive number, not nan"),
        ({"rope_theta": "large"}, "`rope_theta`"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear needs `factor`"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0}}, "below high_freq_factor"),
        ({"rope_scaling": {"type": "factors", "factors": [1.0] * 7}}, "has 7 factors, half the head size is 8"),
        ({"rope_scaling": {"type": "factors", "factors": "many"}}, "rope scaling: "),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"use_sliding_window": True, "sliding_window": 128}, "only full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full attention"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq' are not supported"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_config(CONFIG | changes, None, source="the/config.json")
    assert str(caught.value).startswith("the/config.json: ")


def test_sliding_window_that_is_off_is_fine() -> None:
    parse_config(CONFIG | {"use_sliding_window": False, "sliding_window": 4096}, None, source="c")


def test_unknown_architectures_and_ids(qwen2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'MambaForCausalLM' is not supported; these are: Llama"):
        load_model(copy(qwen2_folder, tmp_path / "a", architectures=["MambaForCausalLM"]))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path)
    several = copy(qwen2_folder, tmp_path / "b")
    (several / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_config(several).eos_token_ids == (2, 7)
    (several / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        read_config(several)


def test_fingerprint_is_the_models(qwen2_folder: Path, tmp_path: Path) -> None:
    own = fingerprint(qwen2_folder, "float32")
    other = copy(qwen2_folder, tmp_path / "m")
    assert fingerprint(other, "float32") == own
    assert fingerprint(other, "bfloat16") != own
    weights = load_file(other / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        save(weights | {name: weights[name] + 0.01}, other / "model.safetensors")
        assert fingerprint(other, "float32") != own, name
    save(weights, other / "model.safetensors")
    assert fingerprint(other, "float32") == own
    assert fingerprint(copy(qwen2_folder, tmp_path / "n", rope_theta=5e5), "float32") != own
    (other / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="cut off"):
        fingerprint(other, "float32")


def run(code: str, cache: Path) -> subprocess.Popen[str]:
    """A Python process with its own cache of converted models."""
    environment = os.environ | {"TANDEM_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_convert_once_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.weights.resolve import resolve; seen = []\n"
        "print(resolve(progress=lambda fraction, what: seen.append(what)), len(seen), 'torch' in sys.modules)"
    )
    processes = [run(code, tmp_path) for _ in range(2)]
    lines = sorted(process.communicate()[0].split() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    (folder, first, _), (same, second, _) = lines
    assert folder == same and sorted([int(first) > 0, int(second) > 0]) == [False, True]
    assert [line[2] for line in lines] == ["False", "False"]
    assert {path.name for path in Path(folder).iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert sorted(path.suffix for path in Path(folder).parent.iterdir() if path.suffix in (".lock", ".partial")) == [
        ".lock"
    ]


def test_names_and_paths(qwen2_folder: Path, tmp_path: Path) -> None:
    assert resolve(str(qwen2_folder)) == qwen2_folder.resolve()
    assert model_name(str(qwen2_folder), qwen2_folder) == qwen2_folder.name
    assert model_name("smollm2", tmp_path) == DEFAULT_MODEL
    assert model_name("/models/tiny.Q4_0.gguf", tmp_path) == "tiny.Q4_0"
    with pytest.raises(ModelError, match=f"name a Hugging Face folder, a .gguf file, or {DEFAULT_MODEL}"):
        resolve("gpt-17")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_gguf_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    for content, message in (
        (b"", "cannot be read"),
        (b"GGML" * 20, "not a GGUF file"),
        (b"GGUF\1\0\0\0", "not a GGUF"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            resolve(str(path))
    monkeypatch.setenv("TANDEM_CACHE", str(path / "below-a-file"))
    with pytest.raises(ModelError, match="TANDEM_CACHE names another place"):
        resolve(str(path))
