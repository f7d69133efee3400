"""Kernels and engine on a CUDA device, against float32 and against the device's limits: `python -m bench.gpu_engine`.

First correctness: attention of both kernels against a dense reference, then the tokens of a small model on the device
against those of the CPU. Then time: decode steps and prompts of dummy models of real shapes, each beside the time that
the reading of its weights and KV, or its arithmetic, takes at the measured speed of the device.
"""

import argparse
import gc
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.attention.base import LayerKind, Span
from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCache, KVCacheSpec
from engine.request import Request, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
SMALL: dict[str, dict[str, Any]] = {
    name: shape | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
    for name, shape in SHAPES.items()
}  # fmt: skip


def folder_of(shape: dict[str, Any]) -> Path:
    """A folder with a configuration and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-shape-"))
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


_STEPS = (  # start and length of each span
    [(1099, 1), (0, 1), (17, 1), (0, 333), (512, 300), (63, 2), (200, 1)],
    [(1083, 17), (3, 1)],
    [(2950, 50), (63, 2)],
    [(1020, 80)],
)


def attention_error(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype | None = None, **limits: Any
) -> float:
    """Largest relative error (Frobenius, per span) of the paged kernels against dense attention in float64.

    With another `kv_dtype` of the cache, against attention over what the cache then holds. In steps with many tokens,
    and with few behind many keys, which are split then.
    """
    return max(_attention_error(spans, dtype, heads, kv_heads, dim, kv_dtype, **limits) for spans in _STEPS)


def _attention_error(
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    kv_dtype: torch.dtype | None,
    **limits: Any,
) -> float:
    from engine.attention.paged import PagedBackend
    from engine.layers.rotary import Rotation

    torch.manual_seed(heads * dim)
    page, layers, longest = 16, 2, 3000
    pages = [-(-(start + length) // page) for start, length in spans]
    cache = KVCache(KVCacheSpec(layers, page, kv_heads, dim, kv_dtype or dtype), sum(pages) + 5, device="cuda")
    cache.tensor.copy_(torch.randn(cache.tensor.shape, device="cuda"))
    order = torch.randperm(sum(pages) + 5).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in pages]
    kind = LayerKind(heads, dim**-0.5, **limits)
    backend = PagedBackend(cache, kind, 16, -(-longest // page))
    context = backend.plan([Span(b, s, n) for b, (s, n) in zip(blocks, spans, strict=True)])
    tokens = sum(length for _, length in spans)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    ones, zeros = torch.ones(longest, dim // 2, device="cuda"), torch.zeros(longest, dim // 2, device="cuda")
    rotation = Rotation(ones, zeros, context.positions, dtype)  # turns nothing
    got = context.forward_projected(1, qkv, (heads, kv_heads, kv_heads), None, rotation).double()
    q = qkv.view(tokens, -1, dim)[:, :heads].double()
    worst, first = 0.0, 0
    for ids, (start, length) in zip(blocks, spans, strict=True):
        kv = torch.cat([cache.layer(1)[block].double() for block in ids])[: start + length]
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (kv[..., :dim], kv[..., dim:]))
        scores = torch.einsum("qhd,khd->hqk", q[first : first + length], k) * dim**-0.5
        if cap := limits.get("logit_softcap"):
            scores = cap * torch.tanh(scores / cap)
        behind = torch.arange(start, start + length, device="cuda")[:, None] - torch.arange(len(k), device="cuda")
        hidden = behind < 0
        if window := limits.get("sliding_window"):
            hidden |= behind >= window
        want = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        error = (got[first : first + length] - want).norm() / want.norm()
        worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
        first += length
    return worst


def attention_errors() -> dict[str, float]:
    """Errors of all combinations of types, shapes and limits that are served; below 1e-2 is right."""
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for heads, kv_heads, dim in ((32, 8, 128), (8, 8, 64), (14, 2, 64), (16, 1, 256)):
            for more in ({}, {"sliding_window": 100}, {"sliding_window": 1500}, {"logit_softcap": 5.0}):
                key = f"{dtype} {heads}/{kv_heads}x{dim} {more}"
                found[key] = attention_error(dtype, heads, kv_heads, dim, **more)
                print(f"{'ok ' if found[key] < 1e-2 else 'BAD'} {key}: {found[key]:.2e}", flush=True)
            key = f"{dtype} {heads}/{kv_heads}x{dim} over FP8"
            found[key] = attention_error(dtype, heads, kv_heads, dim, torch.float8_e4m3fn)
            print(f"{'ok ' if found[key] < 1e-2 else 'BAD'} {key}: {found[key]:.2e}", flush=True)
    return found


def generate(engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    """Tokens of all prompts, computed together; half of the requests come later."""
    tokens: list[list[int]] = [[] for _ in prompts]
    coming = list(enumerate(zip(prompts, sampling, strict=True)))
    steps = 0
    while engine.has_work() or coming:
        for i, (prompt, params) in coming[: len(prompts) // 2 if steps in (0, 7) else 0]:
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=params))
        coming = coming[len(prompts) // 2 :] if steps in (0, 7) else coming
        for output in engine.step().outputs:
            if output.error:
                raise RuntimeError(output.error)
            tokens[int(output.request_id)] += output.token_ids
        steps += 1
    return tokens


def small_model_agrees(shape: dict[str, Any]) -> dict[str, float]:
    """Shares of tokens of a small float32 model that are the CPU's, same weights, in three ways of being busy."""
    from safetensors.torch import save_file

    from engine.weights.load import load_model

    folder = folder_of(shape)
    model, _ = load_model(folder, device="cuda", dummy_seed=7)
    weights = {name: place.destination.contiguous().cpu() for name, place in model.places().items()}
    save_file(weights, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 40, 1, 200, 333, 17, 64, 90, 16, 31, 32, 33]
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    prompts += [[*prompts[4][:300], 1, 2, 3], [*prompts[3][:150], 4]]  # share prefixes
    torch.backends.cuda.matmul.allow_tf32 = False
    greedy = SamplingParams(max_tokens=48, temperature=0.0)
    mixed = [
        SamplingParams(max_tokens=30 + i, temperature=0.8 * (i % 3), top_k=(0, 50)[i % 2], top_p=(1.0, 0.9)[i % 4 == 1])
        for i in range(len(prompts))
    ]
    mixed[1] = SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.3)
    mixed[2] = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=2, min_p=0.1)
    ways = {
        "greedy": ([greedy] * len(prompts), 400),
        "preempted": ([greedy] * len(prompts), 45),
        "sampled": (mixed, 400),
    }
    found = {}
    for way, (sampling, blocks) in ways.items():
        size: dict[str, Any] = {"num_blocks": blocks, "max_batched_tokens": 128, "max_running": 16}
        ours = generate(Engine.build(folder, EngineConfig(device="cuda", **size)), prompts, sampling)
        want = generate(Engine.build(folder, EngineConfig(**size)), prompts, sampling)
        assert [len(tokens) for tokens in ours] == [len(tokens) for tokens in want], way
        same = sum(a == b for x, y in zip(ours, want, strict=True) for a, b in zip(x, y, strict=True))
        found[way] = same / sum(map(len, want))
        stops = [SamplingParams(max_tokens=48, temperature=0.0, stop_token_ids=(tokens[9],)) for tokens in want]
        if way == "greedy":  # ends that nobody foresees, with the next step under way
            engine = Engine.build(folder, EngineConfig(device="cuda", **size))
            ended = generate(engine, prompts, stops)
            cut = [tokens[: tokens.index(stop.stop_token_ids[0]) + 1] for tokens, stop in zip(want, stops, strict=True)]
            found["stopped"] = float(ended == cut)
            found["orphaned"] = float(engine.orphaned_blocks([]))
    return found


def flips(name: str) -> dict[str, Any]:
    """How often greedy tokens of a bfloat16 model depend on the batch: the same 16 prompts alone, together, and busy.

    Weights are random, so logits lie nearer to each other than in a trained model: an upper bound.
    """
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_memory=4 << 30, max_batched_tokens=2048, max_running=64, dummy_seed=1
    )
    engine = Engine.build(folder_of(SHAPES[name]), config)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1000, (150 + 7 * i,), generator=generator).tolist() for i in range(64)]

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        engine.clear_cache()
        tokens: list[list[int]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            engine.add(request(str(i), prompt, 64))
        while engine.has_work():
            for output in engine.step().outputs:
                tokens[int(output.request_id)] += output.token_ids
        return tokens

    alone = [answers([prompt])[0] for prompt in prompts[:16]]
    found: dict[str, Any] = {}
    for count in (16, 64):
        same = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            for a, b in zip(alone, answers(prompts[:count])[:16], strict=True)
        ]
        agreed = sum(64 if first is None else first for first in same)
        other = sum(first is not None for first in same)
        found[f"{count} together"] = {"other_answers": other / 16, "flips_per_1000_tokens": 1000 * other / agreed}
        print(name, count, found[f"{count} together"], flush=True)
    return found


def timed(run: Any, repeats: int) -> float:
    """Median seconds of `run`, device included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def limits() -> tuple[float, float]:
    """(bytes per second of a large copy, read and write together; bf16 operations per second of a large product)."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    copy = 2 * a.numel() / timed(lambda: b.copy_(a), 20)
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: x @ y, 3)
    return copy, 2 * 8192**3 / timed(lambda: x @ y, 20)


def speed(
    name: str, weights: str, kv_dtype: str, batches: list[int], prompts: list[int], context: int = 1024
) -> dict[str, Any]:
    """Times of one shape: steps of whole engines, so CPU work and sampling are in them.

    `weights`: quantization; limits are those of the bytes that it leaves, and of arithmetic in bfloat16.
    """
    shape = SHAPES[name]
    started = time.perf_counter()
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        quantization=weights,
        kv_dtype=kv_dtype,
        kv_memory=40 << 30,
        max_batched_tokens=16384,
        max_running=256,
        dummy_seed=1,
    )
    engine = Engine.build(folder_of(shape), config)
    found: dict[str, Any] = {"start_s": time.perf_counter() - started, "decode": [], "prefill": []}
    copy, flops = limits()
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    h, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    body, head = layers * (h * (q + 2 * kv) + q * h + 3 * h * inner), shape["vocab_size"] * h
    kv_bytes = layers * kv * 2 * (2 if kv_dtype == "auto" else 1)
    weight_bytes = body * (2 if weights == "auto" else 1) + head * (1 if weights == "int8" else 2)
    generator = torch.Generator().manual_seed(3)

    def prompt(length: int) -> list[int]:
        return torch.randint(0, shape["vocab_size"], (length,), generator=generator).tolist()

    for length in prompts:
        times: list[float] = []
        for _ in range(5):
            engine.add(request(f"p{len(times)}", prompt(length), 1))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            while engine.has_work():
                engine.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        work = 2 * body * length + 2 * head + 2 * layers * q * length * length
        seconds = sorted(times)[2]
        found["prefill"].append({"tokens": length, "ms": 1e3 * seconds, "of_limit": work / flops / seconds})
        print(name, weights, kv_dtype, found["prefill"][-1], flush=True)
    for batch in batches:
        engine.clear_cache()
        for i in range(batch):
            engine.add(request(f"d{batch}-{i}", prompt(context), 64))
        while engine.stats().running < batch or engine.stats().waiting:
            engine.step()
        steps = []
        for _ in range(24):
            begun = time.perf_counter()
            engine.step()  # ends with the tokens on the CPU
            steps.append(time.perf_counter() - begun)
        idle = idle_share(engine, 10)
        for i in range(batch):
            engine.abort(f"d{batch}-{i}")
        while engine.has_work():
            engine.step()
        moved = weight_bytes + kv_bytes * batch * (context + 16)
        floor = max(moved / copy, 2 * (body + head) * batch / flops)
        seconds = sorted(steps)[len(steps) // 2]
        found["decode"].append({"batch": batch, "ms": 1e3 * seconds, "of_limit": floor / seconds, "idle_share": idle})
        print(name, weights, kv_dtype, found["decode"][-1], flush=True)
    return found | {"copy_bytes_per_s": copy, "bf16_flops": flops}


def idle_share(engine: Engine, steps: int) -> float:
    """Share of the time between the first and the last kernel of some steps in which none ran, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == "CUDA"
    )
    busy, last = 0.0, float(spans[0][0])
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return float(1 - busy / (last - spans[0][0]))


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    """A greedy request without end tokens."""
    return Request(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--parts", nargs="*", default=["attention", "tokens", "speed"])
    parser.add_argument("--weights", nargs="*", default=["auto"], help="of auto (bfloat16), fp8 and int8")
    parser.add_argument("--kv", nargs="*", default=["auto"], help="of auto (bfloat16) and fp8")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompts", nargs="*", type=int, default=[256, 1024, 4096, 15000])
    arguments = parser.parse_args()
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    if "attention" in arguments.parts:
        report["attention_error"] = attention_errors()
    if "tokens" in arguments.parts:
        report["tokens_as_on_cpu"] = {name: small_model_agrees(shape) for name, shape in SMALL.items()}
        print(report["tokens_as_on_cpu"], flush=True)
    if "flips" in arguments.parts:
        report["flips"] = {name: flips(name) for name in arguments.shapes}
    if "speed" in arguments.parts:
        for name, weights, kv_dtype in itertools.product(arguments.shapes, arguments.weights, arguments.kv):
            key = name if weights == kv_dtype == "auto" else f"{name}, weights {weights}, kv {kv_dtype}"
            report[key] = speed(name, weights, kv_dtype, arguments.batches, arguments.prompts)
            gc.collect()
            torch.cuda.empty_cache()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
