"""Weights of eight bits: what is lost, which checkpoints load, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.base import AttentionContext
from engine.config import ModelError, fingerprint, parse_config
from engine.engine import Engine, EngineConfig
from engine.layers.linear import GatedLinear, Linear
from engine.parallel.group import TensorParallelGroup
from engine.quantization.choose import weight_format
from engine.quantization.format import QuantisedFormat, UnpackedFormat
from engine.quantization.fp8 import Fp8
from engine.quantization.rounding import round_rows
from engine.request import Request, SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.weights.load import load_model
from engine.weights.resolve import resolve

FP8 = torch.float8_e4m3fn
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None}
BY_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
BY_TENSOR = BY_CHANNEL | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | {"strategy": "tensor"}}}}
INTEGERS = BY_CHANNEL | {
    "format": "int-quantized",
    "config_groups": {
        "group_0": GROUP | {"weights": WEIGHTS | {"type": "int"}, "input_activations": ACTIVATIONS | {"type": "int"}}
    },
}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


class DenseCausal(AttentionContext):
    """Attention over one sequence from position 0, without a cache."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """[200, vocab] of a seeded prompt."""
    model, config = load_model(folder, **options)
    tokens = torch.randint(3, config.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.logits(model(tokens, torch.arange(200), DenseCausal())).float()


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of Frobenius norms."""
    return float((got - wanted).norm() / wanted.norm())


def is_quantised(name: str) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear layer that is not the output."""
    return name.endswith("_proj.weight")


def write_quantised(
    source: Path, folder: Path, stored: dict[str, Any], *, by_tensor: bool, shape: tuple[int, ...], suffix: str = ""
) -> Path:
    """The model of `source` in eight bits as `stored` says; scales have a `shape` (-1: rows) and a name's `suffix`."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_quantised(name):
            rows = tensor.reshape(1, -1) if by_tensor else tensor
            rounded, scale = round_rows(rows, torch.int8 if stored is INTEGERS else FP8)
            tensors[name] = rounded.reshape(tensor.shape)
            tensors[f"{name}_scale{suffix}"] = scale.reshape(shape)
            if stored.get("activation_scheme") == "static":
                tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.02)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_rows_are_rounded_to_the_nearest_number() -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 300) * torch.logspace(-6, 6, 50).unsqueeze(1)
    rows[7] = 0
    for dtype in (FP8, torch.int8):
        rounded, scale = round_rows(rows, dtype)
        assert rounded.dtype == dtype and scale.shape == (50, 1)
        error = (rounded.double() * scale - rows.double()).abs()
        # Half a step: of floats with three bits behind the point, below the least exponent of a fixed size.
        bound = torch.maximum(rows.abs() / 16, scale * 2**-10) if dtype == FP8 else scale / 2
        assert (error <= bound * 1.0001).all()
        assert (rounded.double().abs().amax(dim=1) == (448 if dtype == FP8 else 127)).sum() == 49
        assert not rounded[7].double().any()


def test_rows_with_infinities_are_no_numbers_and_leave_others_alone() -> None:
    rows = torch.ones(3, 4)
    rows[0, 1], rows[1, 2] = torch.inf, torch.nan
    rounded, scale = round_rows(rows, FP8)
    assert [bool(row) for row in (rounded.float() * scale).isfinite().all(dim=1)] == [False, False, True]


def quantised(linear: Linear, chosen: QuantisedFormat) -> Linear:
    """The linear layer with its weight in the format."""
    weight = linear.weight.clone()
    chosen.allocate(linear)
    for parameter, values in zip((linear.weight, linear.weight_scale), round_rows(weight, chosen.dtype), strict=True):
        parameter.copy_(values)
    linear.pack()
    return linear


def on_cpu(name: str) -> list[QuantisedFormat]:
    """The formats of this name that a CPU may have, those of other CPUs included."""
    found = weight_format(None, name, torch.float32, "cpu")
    unpacked = [UnpackedFormat("int8", torch.int8, torch.float32)] if name == "int8" else []
    return [found, *unpacked] if unpacked and not isinstance(found, UnpackedFormat) else [found]


FORMATS = [*on_cpu("fp8"), *on_cpu("int8")]


def name_of(chosen: QuantisedFormat) -> str:
    return type(chosen).__name__


@pytest.mark.parametrize("chosen", FORMATS, ids=name_of)
def test_a_product_loses_little(chosen: QuantisedFormat) -> None:
    torch.manual_seed(0)
    linear, x = Linear(1024, 300), torch.randn(50, 1024)
    linear.weight.data.normal_(0, 0.02)
    wanted = x @ linear.weight.T
    error = distance(quantised(linear, chosen)(x), wanted)
    # In FP8 each of the factors is off by up to 1/16, evenly spread; a weight of int8 by up to half a step of 1/127.
    assert 0.02 < error < 0.045 if chosen.name == "fp8" else 0.003 < error < 0.012


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "biased"])
def test_logits_are_near_those_of_float32(family: str, request: pytest.FixtureRequest) -> None:
    """Weights drawn at random average nothing out: what is lost in a product adds up through the layers."""
    folder = request.getfixturevalue(f"{family}_folder")
    plain = logits(folder)
    assert 0.01 < distance(logits(folder, quantization="fp8"), plain) < 0.2
    assert 0.001 < distance(logits(folder, quantization="int8"), plain) < 0.05


@pytest.mark.parametrize(("quantization", "same", "worse"), [("fp8", 0.8, 0.1), ("int8", 0.9, 0.05)])
def test_smollm2_predicts_as_well_and_mostly_the_same(quantization: str, same: float, worse: float) -> None:
    folder = resolve()
    text = "The capital of France is Paris. Its most famous sights are the Eiffel Tower and the Louvre, a museum. " * 3
    tokens = torch.tensor(Tokenizer.from_folder(folder).encode_template(text)[:60])
    best, loss = [], []
    for chosen in ("auto", quantization):
        model, _ = load_model(folder, quantization=chosen)
        with torch.inference_mode():
            found = model.logits(model(tokens, torch.arange(len(tokens)), DenseCausal()))
        best.append(found.argmax(dim=1))
        loss.append(float(torch.nn.functional.cross_entropy(found[:-1], tokens[1:])))
    assert (best[0] == best[1]).float().mean() > same
    assert abs(loss[1] - loss[0]) < worse


@pytest.mark.parametrize("chosen", FORMATS, ids=name_of)
@pytest.mark.parametrize("shape", [(96, 80), (64, 160), (576, 1536)])
@pytest.mark.parametrize("kind", [Linear, GatedLinear])
def test_rows_do_not_depend_on_the_batch(kind: type[Linear], shape: tuple[int, int], chosen: QuantisedFormat) -> None:
    torch.manual_seed(0)
    linear = kind(shape[0], shape[1], shape[1], bias=shape[0] == 64)
    for parameter in linear.parameters():
        parameter.data.normal_()
    linear = quantised(linear, chosen)
    x = torch.randn(70, shape[0])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            whole = linear(x)
            for size in (1, 2, 3, 17, 33):
                assert torch.equal(linear(x[:size]), whole[:size])
                assert torch.equal(linear(x[-size:]), whole[-size:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("chosen", on_cpu("int8"), ids=name_of)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_multiplies_by_the_rounded_weight(chosen: QuantisedFormat, bias: bool) -> None:
    torch.manual_seed(0)
    for kind in (Linear, GatedLinear):
        linear = kind(100, 40, 40, bias=bias)
        for parameter in linear.parameters():
            parameter.data.normal_()
        rounded, scale = round_rows(linear.weight, torch.int8)
        x = torch.randn(9, 100) * torch.logspace(-3, 3, 9).unsqueeze(1)
        x[2] = 0
        x[3, 5] *= 100
        added = None if linear.bias is None else linear.bias.double()
        wanted = torch.nn.functional.linear(x.double(), rounded.double() * scale.double(), added)
        if kind is GatedLinear:
            wanted = torch.nn.functional.silu(wanted[:, :40]) * wanted[:, 40:]
        found = quantised(linear, chosen)(x).double()
        assert ((found - wanted).norm(dim=1) <= 1e-3 * wanted.norm(dim=1) + 1e-12).all()  # activations have 16 bits
        x[4, 0], x[6, 1] = torch.nan, torch.inf
        assert linear(x).isfinite().all(dim=1).tolist() == [True] * 4 + [False, True, False, True, True]


@pytest.mark.parametrize(
    ("stored", "by_tensor", "shape", "suffix"),
    [
        (INTEGERS, False, (-1, 1), ""),
        (BY_CHANNEL, False, (-1, 1), ""),
        (BY_CHANNEL, False, (-1,), ""),
        (BY_TENSOR, True, (1,), ""),
        (DYNAMIC, True, (), ""),
        (DYNAMIC, True, (1,), "_inv"),
        (STATIC, True, (), ""),
    ],
)
def test_stored_weights_are_loaded_as_they_are(
    qwen2_folder: Path, tmp_path: Path, stored: dict[str, Any], by_tensor: bool, shape: tuple[int, ...], suffix: str
) -> None:
    folder = write_quantised(qwen2_folder, tmp_path / "q", stored, by_tensor=by_tensor, shape=shape, suffix=suffix)
    model, config = load_model(folder, dtype=torch.float16)  # which no CPU packs
    assert config.quantization == ("int8" if stored is INTEGERS else "fp8")
    file = load_file(folder / "model.safetensors")

    def plain(name: str) -> torch.Tensor:
        values = file[name].float()
        return (values * file[f"{name}_scale{suffix}"].reshape(-1, 1)).half() if is_quantised(name) else values

    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = torch.cat([plain(f"{attention}{part}_proj.weight") for part in "qkv"])
        assert torch.equal(layer.attention.qkv.weight, qkv)
        assert torch.equal(layer.attention.output.weight, plain(f"{attention}o_proj.weight"))
        assert torch.equal(
            layer.mlp.gate_up.weight, torch.cat([plain(f"{mlp}{n}_proj.weight") for n in ("gate", "up")])
        )
        assert torch.equal(layer.mlp.down.weight, plain(f"{mlp}down_proj.weight"))
    assert torch.equal(model.lm_head.weight, file["lm_head.weight"].half())


def test_stored_and_rounded_while_loading_are_the_same(qwen3_folder: Path, tmp_path: Path) -> None:
    folder = write_quantised(qwen3_folder, tmp_path / "q", BY_CHANNEL, by_tensor=False, shape=(-1, 1))
    assert torch.equal(logits(folder), logits(qwen3_folder, quantization="fp8"))


def test_int8_rounds_the_output_too_unless_the_checkpoint_is_quantised(qwen2_folder: Path, tmp_path: Path) -> None:
    stored = write_quantised(qwen2_folder, tmp_path / "q", INTEGERS, by_tensor=False, shape=(-1, 1))
    models = [load_model(folder, quantization="int8")[0] for folder in (qwen2_folder, stored)]
    hidden = torch.randn(4, 64)
    outputs = [model.lm_head(hidden) for model in models]
    weight = load_file(qwen2_folder / "model.safetensors")["lm_head.weight"]
    errors = [distance(output, hidden @ weight.T) for output in outputs]
    assert errors[0] > 0.001 and errors[1] < 1e-5


@pytest.mark.parametrize("is_stored", [False, True])
def test_ranks_load_their_shares_and_scales(biased_folder: Path, tmp_path: Path, is_stored: bool) -> None:
    folder = biased_folder
    if is_stored:
        folder = write_quantised(folder, tmp_path / "q", BY_CHANNEL, by_tensor=False, shape=(-1, 1))
    options: dict[str, Any] = {"dtype": torch.float16, "quantization": "fp8"}
    whole, _ = load_model(folder, **options)
    shares = [load_model(folder, group=TensorParallelGroup(rank, 2, "cpu", Path()), **options)[0] for rank in (0, 1)]
    for layer, *parts in zip(whole.layers, *(share.layers for share in shares), strict=True):
        gates, ups = zip(*(part.mlp.gate_up.weight.chunk(2) for part in parts), strict=True)
        assert torch.equal(torch.cat((*gates, *ups)), layer.mlp.gate_up.weight)
        down = torch.cat([part.mlp.down.weight for part in parts], dim=1)
        if is_stored:
            assert torch.equal(down, layer.mlp.down.weight)
        else:  # each rank rounds its columns alone, with finer scales
            assert distance(down.float(), layer.mlp.down.weight.float()) < 0.05


def test_dummy_weights_are_rounded_too(llama_folder: Path) -> None:
    plain = logits(llama_folder, dummy_seed=3)
    assert 0.005 < distance(logits(llama_folder, dummy_seed=3, quantization="fp8"), plain) < 0.2


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' are not supported"),
        ({"bits": 4}, "None are not supported"),
        ("fp8", "must be an object"),
        (DYNAMIC | {"weight_block_size": [128, 128]}, r"`weight_block_size` \[128, 128\] is not supported"),
        (DYNAMIC | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}, "0.mlp.down_proj' is not"),
        (BY_CHANNEL | {"ignore": ["lm_head", "re:.*self_attn.*"]}, "re:.*self_attn.*' is not quantised"),
        (BY_CHANNEL | {"config_groups": {"a": GROUP, "b": GROUP}}, "must have one group"),
        (BY_CHANNEL | {"config_groups": {"a": GROUP | {"targets": ["q_proj"]}}}, "targets"),
        (BY_CHANNEL | {"config_groups": {"a": GROUP | {"input_activations": None}}}, "both be quantised"),
        (BY_CHANNEL | {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"num_bits": 4}}}}, "eight bits"),
        (BY_CHANNEL | {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"strategy": "group"}}}}, "by 'group'"),
        (BY_CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`sparsity_config`"),
    ],
)
def test_other_checkpoints_are_refused(qwen2_folder: Path, stored: Any, message: str) -> None:
    config = json.loads((qwen2_folder / "config.json").read_text()) | {"quantization_config": stored}
    with pytest.raises(ModelError, match=f"here: .*{message}"):
        parse_config(config, None, source="here")


def test_checkpoints_that_are_not_what_they_say(qwen2_folder: Path, tmp_path: Path) -> None:
    folder = write_quantised(qwen2_folder, tmp_path / "q", BY_CHANNEL, by_tensor=False, shape=(-1, 1))
    config = (folder / "config.json").read_text()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(message: str, config: str, tensors: dict[str, torch.Tensor]) -> None:
        (folder / "config.json").write_text(config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            load_model(folder)

    refused(
        "up_proj.weight has type torch.bfloat16; .* torch.float8", config, tensors | {name: tensors[name].bfloat16()}
    )
    refused("weight_scale has no place in a Qwen2", (qwen2_folder / "config.json").read_text(), tensors)
    refused(
        "1 tensors are missing, such as .*up_proj.weight_scale",
        config,
        {key: value for key, value in tensors.items() if key != f"{name}_scale"},
    )
    refused(r"up_proj.weight_scale has shape \[2, 1\]", config, tensors | {f"{name}_scale": torch.ones(2, 1)})


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ModelError, match="holds fp8 weights, which cannot become int8"):
        weight_format("fp8", "int8", torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"in bfloat16 on cuda, not torch\.float32: set dtype to bfloat16"):
        weight_format(None, "fp8", torch.float32, "cuda")
    with pytest.raises(ModelError, match=r"300 x 64 cannot be fp8 on this device: .* multiples of 16"):
        Fp8().allocate(Linear(64, 300))


def test_quantization_is_part_of_the_identity(qwen2_folder: Path) -> None:
    engines = [
        Engine.build(qwen2_folder, EngineConfig(num_blocks=8, quantization=quantization))
        for quantization in ("auto", "fp8", "int8")
    ]
    assert len({engine.fingerprint for engine in engines}) == 3
    assert engines[0].fingerprint == fingerprint(qwen2_folder, "float32")


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_engine_computes_the_same_alone_and_together(qwen3_folder: Path, quantization: str) -> None:
    """Prompts in chunks and in batches of other sizes, and prefixes that are cached."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 40, 70)]
    engine = Engine.build(qwen3_folder, EngineConfig(num_blocks=64, max_batched_tokens=32, quantization=quantization))
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    assert run(engine, [*prompts, prompts[1]]) == [*alone, alone[1]]


def run(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their logprobs."""
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        for output in engine.step().outputs:
            scores = [score.logprob for score in output.logprobs or []]
            found[int(output.request_id)] += list(zip(output.token_ids, scores, strict=True))
    return found
