"""Our models against transformers, and the errors of folders that cannot be served."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import ModelError, fingerprint
from engine.layers.linear import Linear
from engine.weights.load import load_model


class DenseCausal:
    """Attention over one sequence from position 0, without a cache."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, config = load_model(folder)
    tokens = torch.randint(3, config.vocab_size, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens.unsqueeze(0)).logits[0]
        ours = model.logits(model(tokens, torch.arange(300), DenseCausal()))
    torch.testing.assert_close(ours, expected, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(576, 960), (576, 3072), (1536, 576), (576, 49152), (64, 192)])
def test_rows_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = Linear(*shape)
    linear.weight.data.normal_(0, 0.05)
    linear.pack()
    x = torch.randn(257, shape[0])
    sizes = [*range(1, 41), 64, 100, 257] if shape[1] < 10_000 else [1, 2, 3, 7, 17, 32, 64]
    expected = linear(x)
    for size in sizes:
        assert torch.equal(linear(x[:size]), expected[:size]), size
    torch.testing.assert_close(expected, x @ _plain_weight(shape).T, atol=1e-3, rtol=1e-3)


def _plain_weight(shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(0)
    linear = Linear(*shape)
    return linear.weight.data.normal_(0, 0.05)


def test_dummy_weights_are_seeded(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copy(llama_folder / "config.json", tmp_path)
    first, _ = load_model(tmp_path, dummy_seed=3)
    again, _ = load_model(tmp_path, dummy_seed=3)
    other, _ = load_model(tmp_path, dummy_seed=4)
    assert torch.equal(first.embedding.weight, again.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def _broken(folder: Path, source: Path, **config: object) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_errors_name_what_is_wrong(qwen2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'MambaForCausalLM' is not supported"):
        load_model(_broken(tmp_path / "a", qwen2_folder, architectures=["MambaForCausalLM"]))
    with pytest.raises(ModelError, match="rope scaling 'yarn' is not supported"):
        load_model(_broken(tmp_path / "b", qwen2_folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}))
    with pytest.raises(ModelError, match="hidden_size"):
        load_model(_broken(tmp_path / "c", qwen2_folder, hidden_size=-1))
    with pytest.raises(ModelError, match="has shape"):
        load_model(_broken(tmp_path / "d", qwen2_folder, intermediate_size=128))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path)
    missing = _broken(tmp_path / "e", qwen2_folder)
    weights = load_file(missing / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, missing / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(missing)
    cut = _broken(tmp_path / "f", qwen2_folder)
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cut off"):
        load_model(cut)


def test_fingerprint_tells_weights_apart(qwen2_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "m"
    shutil.copytree(qwen2_folder, other)
    assert fingerprint(other, "float32") == fingerprint(qwen2_folder, "float32")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(other, "float32") != fingerprint(qwen2_folder, "float32")
    assert fingerprint(qwen2_folder, "bfloat16") != fingerprint(qwen2_folder, "float32")
