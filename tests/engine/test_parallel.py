"""Tensor parallelism: what each rank loads, and tokens and logits that do not depend on the number of ranks."""

from pathlib import Path

import pytest
import torch

from engine.config import ModelError, read_config
from engine.parallel.group import ALONE, TensorParallelGroup, rank_config
from engine.weights.load import load_model


def named_weights(folder: Path, group) -> dict[str, torch.Tensor]:
    model, _ = load_model(folder, dtype=torch.float64, group=group)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["biased", "qwen2", "qwen3"])
def test_ranks_load_disjoint_shares_of_the_whole(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    whole = named_weights(folder, ALONE)
    first, second = (named_weights(folder, TensorParallelGroup(rank, 2, "cpu")) for rank in (0, 1))
    config = read_config(folder)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {"qkv": [q, kv, kv], "gate_up": [config.intermediate_size] * 2}
    for name, expected in whole.items():
        a, b = first[name], second[name]
        _, module, kind = f".{name}".rsplit(".", 2)
        if module in fused:
            halves = zip(*(x.split([n // 2 for n in fused[module]]) for x in (a, b)), strict=True)
            assert torch.equal(torch.cat([part for pair in halves for part in pair]), expected), name
        elif module in ("output", "down"):
            assert torch.equal(torch.cat((a, b), 1) if kind == "weight" else a + b, expected), name
            assert kind == "weight" or not b.any()
        elif module == "lm_head":
            assert torch.equal(torch.cat((a, b)), expected), name
        else:
            assert torch.equal(a, expected) and torch.equal(b, expected), name


def test_dummy_weights_are_those_of_one_rank(qwen2_folder: Path) -> None:
    whole, _ = load_model(qwen2_folder, dtype=torch.float64, dummy_seed=4)
    share, _ = load_model(qwen2_folder, dtype=torch.float64, dummy_seed=4, group=TensorParallelGroup(1, 2, "cpu"))
    assert torch.equal(share.layers[1].mlp.down.weight, whole.layers[1].mlp.down.weight.chunk(2, dim=1)[1])
    assert torch.equal(share.lm_head.weight, whole.lm_head.weight.chunk(2)[1])


def test_models_that_do_not_split(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="2 KV heads cannot be split evenly over 4 ranks: choose another tensor_para"):
        rank_config(read_config(llama_folder), 4)
