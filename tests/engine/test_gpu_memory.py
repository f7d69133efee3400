"""Memory of a CUDA device: how the KV cache is sized at start, and what is said when something does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory import DoesNotFit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def folder() -> Path:
    from bench.gpu_engine import SMALL, folder_of

    return folder_of(SMALL["llama-8b"])


def build(folder: Path, **changes: Any) -> Any:
    from engine.engine import Engine, EngineConfig

    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "dummy_seed": 1, "max_running": 32}
    return Engine.build(folder, EngineConfig(**settings | {"max_batched_tokens": 2048} | changes))


def test_cache_takes_what_is_left_and_the_largest_step_fits(folder: Path) -> None:
    from engine.cuda_start import warm_up
    from engine.memory import trial_prompts

    engine = build(folder)
    memory, total = engine.memory, torch.cuda.mem_get_info()[1]
    assert memory.total == total and memory.weights > 0 and memory.work > 0
    spec = engine.kv_cache.spec
    assert 0 <= memory.left - engine.kv_cache.tensor.nbytes < spec.block_bytes
    warm_up(engine, trial_prompts(2048, 32, engine.max_model_len))  # raises if memory does not suffice
    free = torch.cuda.mem_get_info()[0]
    assert free > memory.reserve // 2, f"{free} bytes are free, {memory.reserve} were to be"
    assert engine.max_model_len == 2048 and not engine.snapshot_hashes() and not engine.drain_events()


def test_given_sizes_are_kept(folder: Path) -> None:
    engine = build(folder, kv_memory=64 << 20)
    assert engine.kv_cache.num_blocks == (64 << 20) // engine.kv_cache.spec.block_bytes and engine.memory is None
    assert build(folder, num_blocks=40).max_model_len == 640


def test_what_does_not_fit_is_told_with_numbers(folder: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(DoesNotFit, match=r"KV cache needs [\d,.]+ GiB; .* has [\d,.]+ GiB of [\d,.]+ GiB free"):
        build(folder, kv_memory=2 * total)
    with pytest.raises(DoesNotFit, match=r"--max-model-len 1000 needs a KV cache of .* there is room for 640 tokens"):
        build(folder, num_blocks=40, max_model_len=1000)
    # Nearly all of the device is taken: not even the trial finds room.
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(free - (192 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(DoesNotFit, match=r"lower --kv-memory|no memory is left for the KV cache"):
        build(folder, max_running=256, max_batched_tokens=16384)
    del taken
    torch.cuda.empty_cache()


def test_weights_that_do_not_fit(folder: Path) -> None:
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1 << 20, "hidden_size": 1 << 18}))
    with pytest.raises(DoesNotFit, match=r"the weights need [\d,.]+ GiB; the device has [\d,.]+ GiB of"):
        build(folder)


def tokens(engine: Any) -> list[int]:
    from engine.request import Request, SamplingParams

    prompts = [list(range(5, 300)), list(range(40, 60)), [7]]
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=30, temperature=0.0)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    assert not [output.error for output in outputs if output.error]
    return [token for number in range(3) for o in outputs if o.request_id == str(number) for token in o.token_ids]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_sleep_frees_the_device_and_tokens_stay(folder: Path, quantization: str | None) -> None:
    from engine.cuda_start import give_back

    give_back()
    before = torch.cuda.memory_allocated()
    engine = build(folder, kv_memory=2 << 30, quantization=quantization)
    expected = tokens(engine)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2):  # the second time the copy on the CPU is there already
        engine.clear_cache()
        engine.sleep()
        assert torch.cuda.memory_allocated() - before < 256 << 20  # workspaces of libraries
        assert torch.cuda.mem_get_info()[0] - free > 2 << 30
        engine.wake()
        assert tokens(engine) == expected


def test_no_room_to_wake_leaves_it_asleep(folder: Path) -> None:
    engine = build(folder, kv_memory=2 << 30)
    expected = tokens(engine)
    engine.sleep()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(DoesNotFit, match=r"the device has [\d,.]+ GiB, of which"):
        engine.wake()
    assert engine.asleep
    del taken
    torch.cuda.empty_cache()
    engine.wake()
    assert tokens(engine) == expected
