"""A KV cache in FP8: what is stored, what is lost, and scales that a checkpoint has for it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.base import LayerKind, Span
from engine.attention.sdpa import SdpaBackend
from engine.config import ModelError
from engine.engine import Engine, EngineConfig
from engine.hashing import root_hash
from engine.kv_cache import KVCache, KVCacheSpec
from engine.request import Request, SamplingParams
from engine.weights.load import load_model
from kv_transfer.messages import Order
from kv_transfer.plan import TransferPlan
from kv_transfer.references import BlockRef

FP8 = torch.float8_e4m3fn
KV_HEADS, HEADS, DIM = 2, 6, 16


def attend(cache_dtype: torch.dtype, dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """(outputs, cache) of a prompt in two chunks and one token, beside one of another sequence."""
    cache = KVCache(KVCacheSpec(2, 4, KV_HEADS, DIM, cache_dtype), 12)
    backend = SdpaBackend(cache, LayerKind(HEADS, DIM**-0.5), dtype)
    blocks, other = [5, 2, 7, 0, 3, 8], [1]
    found = []
    for start, end in ((0, 9), (9, 20), (20, 21)):
        context = backend.plan([Span(blocks, start, end - start), Span(other, 0, 1)])
        rows = [*range(start, end), start]
        found.append(context.forward(1, q[rows], k[rows], v[rows]))
    return torch.cat(found), cache


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    q, k, v = (torch.randn(21, heads, DIM) * 3 for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_rounded_keys_and_values(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    found, cache = attend(FP8, dtype, q, k, v)
    rounded = [x.to(FP8).to(dtype) for x in (k, v)]
    assert not torch.equal(rounded[0], k)
    expected, plain = attend(dtype, dtype, q, *rounded)
    assert torch.equal(found, expected)
    assert torch.equal(cache.tensor.to(dtype), plain.tensor)
    assert 4 * cache.spec.block_bytes == plain.spec.block_bytes * (4 // dtype.itemsize)


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    q, k, v = tensors(torch.float32)
    k[0, 0, 0], k[0, 0, 1], v[0, 0, 2] = 1e6, -torch.inf, torch.nan
    _, cache = attend(FP8, torch.float32, q, k, v)
    first = cache.layer(1)[5, 0, 0].float()  # the first token's first head
    assert first[:2].tolist() == [448, -448]
    assert first[DIM + 2].isnan()
    assert cache.tensor.float().isnan().sum() == 1 + cache.layer(1)[1].float().isnan().sum()


def test_another_type_of_cache_is_refused() -> None:
    cache = KVCache(KVCacheSpec(1, 4, KV_HEADS, DIM, torch.bfloat16), 1)
    with pytest.raises(ValueError, match=r"torch\.float32 cannot use a cache of torch\.bfloat16"):
        SdpaBackend(cache, LayerKind(HEADS, 1.0), torch.float32)


def test_workers_with_other_kv_exchange_no_blocks_and_know_no_prefix_of_each_other(qwen2_folder: Path) -> None:
    engines = [
        Engine.build(qwen2_folder, EngineConfig(num_blocks=8, kv_dtype=kv_dtype)) for kv_dtype in ("auto", "fp8")
    ]
    layouts = [engine.kv_cache.spec.layout for engine in engines]
    assert layouts[0] != layouts[1]
    roots = [root_hash(fingerprint="f", layout=layout, block_size=16) for layout in layouts]
    assert roots[0] != roots[1]
    assert engines[0].kv_cache.spec.block_bytes == 4 * engines[1].kv_cache.spec.block_bytes


def run(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their logprobs."""
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            scores = [score.logprob for score in output.logprobs or []]
            found[int(output.request_id)] += list(zip(output.token_ids, scores, strict=True))
    return found


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]


def test_the_engine_computes_the_same_alone_and_together(qwen3_folder: Path) -> None:
    """Prompts in chunks, in batches of other sizes, with prefixes that are cached, and preempted."""
    prompts = prompts_of(5, 40, 70)
    engine = Engine.build(qwen3_folder, EngineConfig(num_blocks=64, max_batched_tokens=32, kv_dtype="fp8"))
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    assert run(engine, [*prompts, prompts[1]]) == [*alone, alone[1]]
    small = Engine.build(qwen3_folder, EngineConfig(num_blocks=9, max_batched_tokens=32, kv_dtype="fp8"))
    assert run(small, [*prompts, prompts[1]]) == [*alone, alone[1]]


def test_blocks_that_moved_are_read_by_another_engine(llama_folder: Path) -> None:
    config = EngineConfig(num_blocks=16, kv_dtype="fp8")
    (prompt,) = prompts_of(50)
    source, target = Engine.build(llama_folder, config), Engine.build(llama_folder, config)
    expected = run(Engine.build(llama_folder, config), [prompt])[0]
    request = Request(
        request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    )
    source.add(request, hold=True)
    (first,) = source.step().outputs
    reservation = target.reserve(request)
    assert reservation is not None
    for ours, theirs in zip(source.held_blocks("a"), reservation.block_ids, strict=False):
        target.kv_cache.block_bytes_view(theirs)[:] = source.kv_cache.block_bytes_view(ours)
    assert first.logprobs is not None
    target.commit_handoff("a", first.token_ids[0], first.logprobs[0])
    found: list[tuple[int, float]] = []
    while target.has_work():
        for output in target.step().outputs:
            scores = [score.logprob for score in output.logprobs or []]
            found += list(zip(output.token_ids, scores, strict=True))
    assert found == expected


def losses(folder: Path, kv_dtype: str, **options: Any) -> torch.Tensor:
    """Log probabilities of a prompt's tokens."""
    engine = Engine.build(folder, EngineConfig(num_blocks=32, kv_dtype=kv_dtype, **options))
    (prompt,) = prompts_of(200)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    (output,) = engine.step().outputs
    assert output.prompt_logprobs is not None
    return torch.tensor([score.logprob for score in output.prompt_logprobs if score is not None])


@pytest.mark.parametrize("family", ["llama", "qwen3", "biased"])
def test_little_is_lost(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    difference = (losses(folder, "fp8") - losses(folder, "auto")).abs()
    assert 0 < difference.mean() < 0.05


def with_scales(source: Path, folder: Path, names: tuple[str, str], key: float, value: float) -> Path:
    """The model of `source` with scales by these names; values are `value` times as large, and outputs undo that."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for attention in {name.rsplit(".", 2)[0] for name in weights if ".self_attn." in name}:
        for name in (f"{attention}.v_proj.weight", f"{attention}.v_proj.bias"):
            if name in weights:
                weights[name] *= value
        weights[f"{attention}.o_proj.weight"] /= value
        weights |= {f"{attention}.{names[0]}": torch.tensor([key]), f"{attention}.{names[1]}": torch.tensor(value)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_scales(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(("k_scale", "v_scale"))}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAMES = {
    "llama": ("k_scale", "v_scale"),
    "qwen3": ("k_proj.k_scale", "v_proj.v_scale"),
    "biased": ("attn.k_scale", "attn.v_scale"),
}


@pytest.mark.parametrize("family", list(NAMES))
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_scales_of_the_checkpoint_bring_small_values_into_range(
    family: str, quantization: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(f"{family}_folder")
    folder = with_scales(source, tmp_path / "scaled", NAMES[family], 2.0**-3, 2.0**-14)
    exact = losses(source, "auto", quantization=quantization)
    best = (losses(source, "fp8", quantization=quantization) - exact).abs().mean()
    scaled = (losses(folder, "fp8", quantization=quantization) - exact).abs().mean()
    plain = without_scales(folder, tmp_path / "plain")
    unscaled = (losses(plain, "fp8", quantization=quantization) - exact).abs().mean()
    assert 0 < scaled < 2 * best < unscaled


def test_scales_are_folded_into_what_stands_around_the_cache(
    biased_folder: Path, qwen3_folder: Path, tmp_path: Path
) -> None:
    key, value = 2.0**-4, 2.0**2  # the powers of two from these on: 0.037, 2.1
    for source in (biased_folder, qwen3_folder):
        folder = with_scales(source, tmp_path / source.name, ("k_scale", "v_scale"), 0.037, 2.1)
        plain_folder = without_scales(folder, tmp_path / f"{source.name}-plain")
        model, _ = load_model(folder, dtype=torch.float64, kv_fp8=True)
        plain, _ = load_model(plain_folder, dtype=torch.float64, kv_fp8=True)
        for ours, theirs in zip(model.layers, plain.layers, strict=True):
            parts = theirs.attention.qkv.parts
            factors = (key, 1 / key, 1 / value) if theirs.attention.norms is None else (1, 1, 1 / value)
            rows = torch.cat([torch.full((n,), f, dtype=torch.float64) for n, f in zip(parts, factors, strict=True)])
            assert torch.equal(ours.attention.qkv.weight, theirs.attention.qkv.weight * rows.unsqueeze(1))
            assert torch.equal(ours.attention.output.weight, theirs.attention.output.weight * value)
            if theirs.attention.qkv.bias is not None:
                assert torch.equal(ours.attention.qkv.bias, theirs.attention.qkv.bias * rows)
                assert torch.equal(ours.attention.output.bias, theirs.attention.output.bias)
            if theirs.attention.norms is not None:
                assert torch.equal(ours.attention.q_norm.weight, theirs.attention.q_norm.weight * key)
                assert torch.equal(ours.attention.k_norm.weight, theirs.attention.k_norm.weight / key)


@pytest.mark.parametrize(("block_size", "family"), [(4, "llama"), (6, "qwen3"), (16, "biased")])
def test_kv_that_is_packed_for_an_fp8_cache_is_what_that_engine_computes(
    block_size: int, family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of the first layer to the bit, with the checkpoint's scales; of others within rounding of what was before."""
    source = request.getfixturevalue(f"{family}_folder")
    folder = with_scales(source, tmp_path / "scaled", NAMES[family], 2.0**-3, 2.0**-5)
    prompt = [(7 * number) % 200 + 3 for number in range(45)]

    def computed(kv_dtype: str, size: int) -> tuple[Engine, list[int]]:
        engine = Engine.build(folder, EngineConfig(block_size=size, num_blocks=60, kv_dtype=kv_dtype))
        engine.add(Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2)), hold=True)
        while not engine.held_blocks("r"):
            engine.step()
        return engine, engine.held_blocks("r")

    (plain, source_blocks), (rounded, own_blocks) = computed("auto", 8), computed("fp8", block_size)
    layout = rounded.kv_cache.spec.layout
    assert ("scales=" in layout, rounded.kv_cache.spec.scales[0]) == (True, (-3, -5))
    plan = TransferPlan(plain.kv_cache.spec.layout, layout)
    order = Order(
        transfer_id="r",
        request=Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams()),
        blocks=[BlockRef("", number, 0) for number in range(-(-len(prompt) // block_size))],
        skip_blocks=0,
        reply_to="",
        lease_seconds=1.0,
    )
    for layer in range(rounded.kv_cache.spec.num_layers):
        (push,) = plan.pushes(plain.pages.tensor, range(layer, layer + 1), source_blocks, order, 0, len(prompt))
        landed = push.source[list(push.source_rows), layer].flatten(0, 1)[: len(prompt)].float()
        own = rounded.kv_cache.layer(layer).view(torch.uint8)[own_blocks].view(FP8).flatten(0, 1)[: len(prompt)].float()
        if layer == 0:
            assert torch.equal(landed, own)
        assert (landed - own).abs().mean() < 0.05 * own.abs().mean()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(qwen2_folder: Path, tmp_path: Path, scale: float) -> None:
    folder = with_scales(qwen2_folder, tmp_path / "m", NAMES["llama"], scale, 1.0)
    with pytest.raises(ModelError, match=r"layer 0 has KV scales \[.*, 1\.0\], which must be positive"):
        load_model(folder, kv_fp8=True)
