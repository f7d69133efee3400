"""Weights of eight bits on a CUDA device: `deploy/test-gpu.sh` runs these where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.base import LayerKind, Span
from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCache, KVCacheSpec
from engine.layers.linear import GatedLinear, Linear
from engine.quantization.choose import weight_format
from engine.quantization.rounding import round_rows
from engine.request import Request, SamplingParams
from engine.weights.load import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
SHAPES = [(4096, 6144), (4096, 28672), (14336, 4096), (4096, 4096)]  # inputs and outputs of a layer of an 8B model


def quantised(linear: Linear, weight: torch.Tensor, name: str) -> Linear:
    """The linear layer on the device, holding `weight` in the format."""
    linear = linear.to("cuda", torch.bfloat16)
    chosen = weight_format(None, name, torch.bfloat16, "cuda")
    assert chosen is not None
    chosen.allocate(linear)
    assert linear.weight_scale is not None
    for parameter, values in zip((linear.weight, linear.weight_scale), round_rows(weight, chosen.dtype), strict=True):
        parameter.copy_(values)
    linear.pack()
    return linear


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of Frobenius norms."""
    return float((got.float() - wanted).norm() / wanted.norm())


def test_tokens_are_rounded_as_on_the_cpu() -> None:
    from engine.kernels.fp8 import round_tokens

    x = torch.randn(70, 1536, device="cuda").bfloat16()
    x[3] = 0
    x[4] *= 1e6
    rounded, scale = round_tokens(x)
    wanted, wanted_scale = round_rows(x, torch.float8_e4m3fn)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    # Where the division is rounded otherwise, a number between two may go to the other one.
    same = rounded.view(torch.uint8) == wanted.view(torch.uint8)
    assert same.float().mean() > 0.999
    assert ((rounded.float() - wanted.float()).abs() <= wanted.float().abs() / 7).all()


@pytest.mark.parametrize("rows", [3, 40])  # of the kernel for few, of the library
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_stay_so(value: float, rows: int) -> None:
    linear = quantised(Linear(256, 64), torch.randn(64, 256, device="cuda"), "fp8")
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    x[1, 100] = value
    assert linear(x).isfinite().all(dim=1).tolist() == [True, False, *[True] * (rows - 2)]


@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_product_is_near_that_of_float32(rows: int, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(shape[1], shape[0], device="cuda") * 0.02, torch.randn(rows, shape[0], device="cuda")
    linear = Linear(*shape, bias=bias)
    if bias:
        linear.bias.normal_()
    linear = quantised(linear, weight, "fp8")
    x = x.bfloat16()
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if not bias else linear.bias.double()).float()
    assert distance(linear(x), wanted) < 0.045  # a factor is off by up to 1/16; few rows keep x as it is
    stream = torch.randn(rows, shape[1], device="cuda").bfloat16()
    before = stream.float()
    linear.add_to(stream, x)
    assert distance(stream.float() - before, wanted) < 0.05


@pytest.mark.parametrize("rows", [1, 3, 40, 64, 1000, 1500])
@pytest.mark.parametrize("shape", [*SHAPES, (96, 80)])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_product_is_that_of_the_rounded_weight(rows: int, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(shape[1], shape[0], device="cuda") * 0.02, torch.randn(rows, shape[0], device="cuda")
    linear = Linear(*shape, bias=bias)
    if bias:
        linear.bias.normal_()
    linear, x = quantised(linear, weight, "int8"), x.bfloat16()
    rounded, scale = round_rows(weight, torch.int8)
    added = linear.bias.double() if bias else None
    wanted = torch.nn.functional.linear(x.double(), rounded.double() * scale.double(), added).float()
    assert distance(linear(x), wanted) < 5e-3
    stream = torch.randn(rows, shape[1], device="cuda").bfloat16()
    before = stream.float()
    linear.add_to(stream, x)
    assert distance(stream.float() - before, wanted) < 2e-2


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 30, 64])
def test_gated_product_of_a_normed_stream(rows: int, name: str) -> None:
    from engine.layers.norm import RMSNorm

    torch.manual_seed(0)
    weight, x = torch.randn(28672, 4096, device="cuda") * 0.02, torch.randn(rows, 4096, device="cuda").bfloat16()
    linear = quantised(GatedLinear(4096, 14336, 14336), weight, name)
    norm = RMSNorm(4096, 1e-5).to("cuda", torch.bfloat16)
    both = torch.nn.functional.rms_norm(x.float(), (4096,), norm.weight.float(), 1e-5) @ weight.T
    gate, up = both.chunk(2, dim=1)
    assert distance(linear.of_normed(norm, x), torch.nn.functional.silu(gate) * up) < 0.07


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """[300, vocab] of a prompt, computed on the device."""
    from engine.attention.paged import PagedBackend

    model, config = load_model(folder, device="cuda", **options)
    spec = KVCacheSpec(config.num_layers, 16, config.num_kv_heads, config.head_dim, options["dtype"])
    backend = PagedBackend(KVCache(spec, 20, device="cuda"), LayerKind(config.num_heads, config.head_dim**-0.5), 4, 20)
    with torch.inference_mode():
        context = backend.plan([Span(list(range(20)), 0, 300)])
        tokens = torch.arange(300, device="cuda") % 1000
        return model.logits(model.forward(tokens, context.positions, context)).float()


@pytest.mark.parametrize(("name", "bound"), [("fp8", 0.2), ("int8", 0.06)])
@pytest.mark.parametrize("family", ["llama-8b", "qwen3-0.6b"])
def test_logits_are_near_those_of_float32(family: str, name: str, bound: float) -> None:
    from bench.gpu_engine import SMALL, folder_of

    folder = folder_of(SMALL[family])
    plain = logits(folder, dtype=torch.float32, dummy_seed=3)
    assert 0.005 < distance(logits(folder, dtype=torch.bfloat16, dummy_seed=3, quantization=name), plain) < bound


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_an_engine_with_graphs_repeats_itself(name: str) -> None:
    from bench.gpu_engine import SMALL, folder_of, generate

    config = EngineConfig(
        device="cuda", dtype="bfloat16", quantization=name, dummy_seed=5, num_blocks=200, max_running=8
    )
    engine = Engine.build(folder_of(SMALL["llama-8b"]), config)
    prompts = [[7 * i + j for j in range(20 + i)] for i in range(8)]
    sampling = [SamplingParams(max_tokens=16, temperature=0.0)] * len(prompts)
    first = generate(engine, prompts, sampling)
    engine.clear_cache()
    assert generate(engine, prompts, sampling) == first
    assert all(len(tokens) == 16 for tokens in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (8, 8, 64), (14, 2, 64), (16, 1, 256)])
@pytest.mark.parametrize("limits", [{}, {"sliding_window": 100}, {"logit_softcap": 5.0}], ids=str)
def test_attention_over_fp8_is_that_of_what_the_cache_holds(dtype, heads, kv_heads, dim, limits) -> None:
    from bench.gpu_engine import attention_error

    error = attention_error(dtype, heads, kv_heads, dim, torch.float8_e4m3fn, **limits)
    assert error < (1e-5 if dtype is torch.float32 else 1e-2)


def test_keys_and_values_are_stored_as_on_the_cpu() -> None:
    """Rounded to the nearest; what is too large becomes the largest, and NaN stays."""
    from engine.kernels.heads import prepare_heads

    cache = torch.zeros(4, 16, 2, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    qkv = (
        torch.randn(16, 8 * 64, device="cuda").bfloat16() * torch.logspace(-4, 4, 16, device="cuda").bfloat16()[:, None]
    )
    qkv[3, -1], qkv[4, -2] = torch.inf, torch.nan
    ones, zeros = torch.ones(16, 32, device="cuda"), torch.zeros(16, 32, device="cuda")
    positions = torch.arange(16, dtype=torch.int32, device="cuda")
    rows, tables = torch.zeros_like(positions), torch.tensor([[2]], dtype=torch.int32, device="cuda")
    prepare_heads(qkv, ones, zeros, positions, rows, tables, cache, 4, None)
    k, v = qkv.view(16, 8, 64)[:, 4:].split(2, dim=1)
    wanted = torch.cat((k, v), dim=-1).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    torch.testing.assert_close(cache[2].float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_an_engine_with_kv_in_fp8_is_near_one_without() -> None:
    """Log probabilities of a prompt, which is computed in chunks over a cache."""
    from bench.gpu_engine import SMALL, folder_of

    found = []
    for kv_dtype in ("auto", "fp8"):
        config = EngineConfig(
            device="cuda", kv_dtype=kv_dtype, dummy_seed=5, num_blocks=200, max_running=8, max_batched_tokens=64
        )
        engine = Engine.build(folder_of(SMALL["qwen3-0.6b"]), config)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(Request(request_id="a", prompt_token_ids=list(range(3, 203)), sampling=sampling))
        scores: list[float] = []
        while engine.has_work():
            for output in engine.step().outputs:
                assert output.error is None
                scores += [score.logprob for score in output.prompt_logprobs or [] if score is not None]
        found.append(torch.tensor(scores))
    difference = (found[0] - found[1]).abs()
    assert len(found[0]) == 199 and 0 < difference.mean() < 0.05
