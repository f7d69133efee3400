"""Our models against transformers, against themselves in other batches, and a real one."""

import pytest
import torch
import transformers

from engine.attention.base import AttentionContext
from engine.config import ModelConfig
from engine.layers.linear import GatedLinear, Linear
from engine.models.registry import model_class
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.weights.load import load_model
from engine.weights.resolve import resolve


class DenseCausal(AttentionContext):
    """Attention over one sequence from position 0, without a cache."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


class Alone(AttentionContext):
    """Each token attends to itself only, and its query counts: nothing here depends on the other tokens."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        return (q + k.repeat_interleave(repeats, 1)) * v.repeat_interleave(repeats, 1)


@pytest.fixture(params=[1, 2, 7])
def threads(request: pytest.FixtureRequest):
    """Thread counts that divide rows evenly and ones that do not."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(576, 960), (576, 3072), (1536, 576), (576, 49152), (64, 192), (100, 36)])
def test_rows_do_not_depend_on_the_batch(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(*shape, bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_(0, 0.05)
    x = torch.randn(257, shape[0])
    plain = linear(x)
    linear.pack()
    assert linear.weight.numel() == 0
    expected = linear(x)
    torch.testing.assert_close(expected, plain, atol=1e-4, rtol=1e-4)
    for size in [*range(1, 41), 64, 100] if shape[1] < 10_000 else [1, 2, 3, 7, 17, 32]:
        assert torch.equal(linear(x[:size]), expected[:size]), size
        assert torch.equal(linear(x[-size:]), expected[-size:]), size


@pytest.mark.parametrize("bias", [False, True])
def test_gated_product(bias: bool) -> None:
    torch.manual_seed(0)
    linear = GatedLinear(64, 160, 160, bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_(0, 0.5)
    x = torch.randn(33, 64)
    plain = linear(x)
    gate, up = torch.nn.functional.linear(x, linear.weight, linear.bias).chunk(2, dim=-1)
    torch.testing.assert_close(plain, gate * gate.sigmoid() * up)
    linear.pack()
    packed = linear(x)
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)
    for size in range(1, 33):
        assert torch.equal(linear(x[:size]), packed[:size]), size


@pytest.mark.parametrize("kind", [Linear, GatedLinear])
def test_bfloat16_is_packed_where_the_cpu_multiplies_it(kind: type[Linear]) -> None:
    torch.manual_seed(0)
    linear = kind(576, 160, 160).bfloat16()
    linear.weight.data.normal_(0, 0.05)
    exact = kind(576, 160, 160)
    exact.weight.data.copy_(linear.weight)
    x = torch.randn(33, 576).bfloat16()
    linear.pack()
    assert bool(linear.packed) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for size in (1, 2, 33):
        torch.testing.assert_close(linear(x[:size]).float(), exact(x[:size].float()), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_token_does_not_depend_on_its_batch(architecture: str, threads: None) -> None:
    """Everything but attention, bit by bit, at SmolLM2's sizes."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=2,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = model_class(config)(config)
    generator = torch.Generator().manual_seed(3)
    for place in model.places().values():
        place.destination.copy_(torch.randn(place.shape, generator=generator) * 0.2)
    model.finish_loading("cpu")
    tokens = torch.randint(0, 1000, (300,), generator=generator)
    positions = torch.randint(0, 512, (300,), generator=generator)
    with torch.inference_mode():
        hidden = model(tokens, positions, Alone())
        logits = model.logits(hidden)
        assert logits.isfinite().all()
        for part in [slice(7, 8), slice(0, 2), slice(5, 24), slice(100, 164), slice(43, 300), slice(0, 299)]:
            ours = model(tokens[part], positions[part], Alone())
            assert torch.equal(ours, hidden[part]), part
            assert torch.equal(model.logits(ours), logits[part]), part


def test_smollm2_knows_the_capital_of_france() -> None:
    folder = resolve()
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    tokens = tokenizer.encode_template(prompt)
    start = len(tokens)
    model, config = load_model(folder)
    with torch.inference_mode():
        while tokens[-1] not in config.eos_token_ids and len(tokens) < start + 12:
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), DenseCausal())
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    assert tokenizer.decode(tokens[start:]) == "The capital of France is Paris."


def test_smollm2_text_becomes_the_ids_of_its_own_tokenizer() -> None:
    tokenizer = Tokenizer.from_folder(resolve())
    ids = {
        "What is 2+2? 12345 3.14": [1780, 314, 216, 34, 27, 34, 47, 216, 33, 34, 35, 36, 37, 216, 35, 30, 33, 36],
        "it's they'll WE'VE": [269, 506, 502, 3060, 26587, 23, 18525],
        "  leading and   many    spaces  ": [216, 2899, 284, 256, 800, 333, 5600, 256],
        "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
        "Grüße, naïve café — 東京": [
            27302,
            7170,
            34878,
            85,
            28,
            15486,
            46494,
            37366,
            1841,
            17097,
            247,
            126,
            16736,
            122,
        ],
    }
    assert {text: tokenizer.encode_template(text) for text in ids} == ids
