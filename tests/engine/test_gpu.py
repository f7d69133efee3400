"""The engine on a CUDA device against the CPU: `deploy/test-gpu.sh` runs these where there is one."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (8, 8, 64), (14, 2, 64), (16, 1, 256)])
@pytest.mark.parametrize(
    "limits", [{}, {"sliding_window": 100}, {"sliding_window": 1500}, {"logit_softcap": 5.0}], ids=str
)
def test_attention_is_that_of_float64(dtype, heads, kv_heads, dim, limits) -> None:
    from bench.gpu_engine import attention_error

    assert attention_error(dtype, heads, kv_heads, dim, **limits) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("family", ["llama-8b", "qwen3-0.6b"])
def test_tokens_are_those_of_the_cpu(family: str) -> None:
    """Float32: chunks, prefix hits, preemption, sampling and stops that nobody foresees, with a step computed ahead."""
    from bench.gpu_engine import SMALL, small_model_agrees

    found = small_model_agrees(SMALL[family])
    assert found.pop("orphaned") == 0
    assert set(found.values()) == {1.0}, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(7, 100), (4096, 4096), (1001, 14336)])
def test_matvec_is_a_product(dtype, n: int, k: int) -> None:
    from engine.kernels.matvec import matvec

    x, weight, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((1, k), (n, k), (n,)))
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert (matvec(x, weight, bias).double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(10, 100), (4096, 4096), (1002, 8192)])
def test_matvec_with_norm_gate_and_residual(dtype, n: int, k: int) -> None:
    from engine.kernels.matvec import matvec

    functional = torch.nn.functional
    x, weight, factors, stream = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((1, k), (2 * n, k), (k,), (1, 2 * n))
    )
    normed = functional.rms_norm(x.double(), (k,), factors.double(), 1e-5)
    gate, up = functional.linear(normed, weight.double() / k**0.5).chunk(2, dim=-1)
    found = matvec(x, weight / k**0.5, norm=(factors, 1e-5), gated=True)
    want = functional.silu(gate) * up
    assert (found.double() - want).norm() < 1e-2 * want.norm()
    want = stream.double() + functional.linear(x.double(), weight.double())
    assert (matvec(x, weight, add_to=stream).double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [2, 16, 17, 32])
@pytest.mark.parametrize(("n", "k"), [(7, 100), (4096, 4096), (1001, 14336)])
def test_few_rows_with_gate_and_residual(dtype, m: int, n: int, k: int) -> None:
    from engine.kernels.few_rows import few_rows

    functional = torch.nn.functional
    x, weight, stream = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (2 * n, k), (m, 2 * n)))
    bias = torch.randn(2 * n, device="cuda").to(dtype)
    weight /= k**0.5
    want = functional.linear(x.double(), weight.double(), bias.double())
    assert (few_rows(x, weight, bias).double() - want).norm() < 1e-2 * want.norm()
    gate, up = want.chunk(2, dim=-1)
    gated = functional.silu(gate) * up
    assert (few_rows(x, weight, bias, gated=True).double() - gated).norm() < 1e-2 * gated.norm()
    want += stream.double()
    assert (few_rows(x, weight, bias, add_to=stream).double() - want).norm() < 1e-2 * want.norm()


def test_nothing_is_written_for_a_request_aborted_inside_a_step() -> None:
    """One whose token is chosen on the CPU, and whose blocks another request has got before its turn comes."""
    from bench.gpu_engine import SMALL, folder_of
    from engine.engine import Engine, EngineConfig
    from engine.request import Request, SamplingParams

    config = EngineConfig(device="cuda", num_blocks=60, max_batched_tokens=128, max_running=4, dummy_seed=7)
    engine = Engine.build(folder_of(SMALL["llama-8b"]), config)
    plain = SamplingParams(max_tokens=40, temperature=0.0)
    scored = SamplingParams(max_tokens=40, temperature=0.0, logprobs=1)

    def add(name: str, first: int, sampling: SamplingParams = plain) -> None:
        engine.add(Request(request_id=name, prompt_token_ids=list(range(first, first + 90)), sampling=sampling))

    def tokens() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step().outputs:
                assert output.error is None
                found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.clear_cache()
        return found

    add("stays", 5)
    add("late", 600)
    expected = tokens()
    add("stays", 5)
    add("gone", 300, scored)
    for _ in range(5):
        engine.step()

    def call() -> None:
        engine.listen = lambda: None
        engine.abort("gone")
        add("late", 600)

    engine.listen = call
    found = tokens()
    assert found["late"] == expected["late"] and found["stays"] == expected["stays"][-len(found["stays"]) :]
    assert len(found["stays"]) > 30 and engine.orphaned_blocks([]) == 0


def test_blocks_of_a_prompt_whose_tokens_the_cpu_chooses_are_lent_when_it_writes_them_no_more() -> None:
    from bench.gpu_engine import SMALL, folder_of
    from engine.engine import Engine, EngineConfig
    from engine.request import Request, SamplingParams

    config = EngineConfig(device="cuda", num_blocks=60, max_batched_tokens=128, max_running=4, dummy_seed=7)
    engine = Engine.build(folder_of(SMALL["llama-8b"]), config)
    engine.on_layers = lambda layers, entries: torch.cuda._sleep(500_000_000)
    penalised = SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=1.2)
    engine.add(Request(request_id="slow", prompt_token_ids=list(range(5, 305)), sampling=penalised))
    engine.step()
    assert not torch.cuda.current_stream().query()
    engine.abort("slow")
    waits = Request(request_id="r", prompt_token_ids=list(range(300, 390)), sampling=SamplingParams(max_tokens=4))
    assert engine.reserve(waits) is not None
    assert torch.cuda.current_stream().query()


def test_a_prefix_of_a_peer_joins_while_the_next_step_is_planned() -> None:
    from bench.gpu_engine import SMALL, folder_of
    from engine.engine import Engine, EngineConfig
    from engine.request import Request, SamplingParams

    config = EngineConfig(device="cuda", num_blocks=60, max_batched_tokens=128, max_running=4, dummy_seed=7)
    source, engine = (Engine.build(folder_of(SMALL["llama-8b"]), config) for _ in range(2))
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    stays, joins = (
        Request(request_id=name, prompt_token_ids=list(range(first, first + 90)), sampling=sampling)
        for name, first in (("stays", 5), ("joins", 300))
    )
    found: dict[str, list[int]] = {"stays": [], "joins": []}

    def run(engine: Engine, steps: int = 1000) -> None:
        for _ in range(steps):
            if not engine.has_work():
                return
            for output in engine.step().outputs:
                assert output.error is None
                found[output.request_id] += output.token_ids

    for request in (stays, joins):
        source.add(request)
    run(source)
    expected, found = found, {"stays": [], "joins": []}
    source_blocks = source.hold_cached(joins) // 16
    assert source_blocks == 5
    engine.add(stays)
    run(engine, 5)

    def fetch() -> None:
        engine.listen = lambda: None
        reservation = engine.reserve(joins, prefix_tokens=80)
        assert reservation is not None and len(reservation.block_ids) == 5
        torch.cuda.synchronize()
        engine.kv_cache.tensor[reservation.block_ids] = source.kv_cache.tensor[source.held_blocks("joins")]
        torch.cuda.synchronize()
        assert engine.commit_prefix("joins", 5)

    engine.listen = fetch
    run(engine)
    assert found == expected and engine.orphaned_blocks([]) == 0


def test_logits_in_bfloat16_are_near_those_of_float32() -> None:
    from bench.gpu_engine import SMALL, folder_of
    from engine.attention.base import LayerKind, Span
    from engine.attention.paged import PagedBackend
    from engine.kv_cache import KVCache, KVCacheSpec
    from engine.weights.load import load_model

    tokens = torch.arange(300, device="cuda") % 1000
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model, config = load_model(folder_of(SMALL["qwen3-0.6b"]), dtype=dtype, device="cuda", dummy_seed=3)
        spec = KVCacheSpec(config.num_layers, 16, config.num_kv_heads, config.head_dim, dtype)
        backend = PagedBackend(
            KVCache(spec, 20, device="cuda"), LayerKind(config.num_heads, config.head_dim**-0.5), 4, 20
        )
        with torch.inference_mode():
            context = backend.plan([Span(list(range(20)), 0, 300)])
            logits.append(model.logits(model.forward(tokens, context.positions, context)).float())
    assert (logits[1] - logits[0]).norm() < 2e-2 * logits[0].norm()
