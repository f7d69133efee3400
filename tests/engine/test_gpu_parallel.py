"""Ranks on several CUDA devices against one CPU: skipped where there are too few devices."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# An engine a process: NCCL's connections, which CUDA graphs hold, end with it.
PROGRAM = """
import faulthandler, json, sys
from pathlib import Path
faulthandler.dump_traceback_later(100, exit=True)  # ranks that wait for each other forever
from engine.engine import Engine, EngineConfig
from engine.request import Request, SamplingParams

folder, config, requests = Path(sys.argv[1]), json.loads(sys.argv[2]), json.load(sys.stdin)
engine = Engine.build(folder, EngineConfig(block_size=16, num_blocks=200, max_running=12, **config))
tokens, logprobs = [[] for _ in requests], [[] for _ in requests]
coming = list(enumerate(requests))
steps = 0
while engine.has_work() or coming:
    arriving = len(requests) // 2 if steps in (0, 5) else 0
    for i, (prompt, sampling) in coming[:arriving]:
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(**sampling)))
    del coming[:arriving]
    for output in engine.step().outputs:
        assert output.error is None, output.error
        tokens[int(output.request_id)] += output.token_ids
        for entry in (*(output.prompt_logprobs or ()), *(output.logprobs or ())):
            logprobs[int(output.request_id)] += [] if entry is None else [entry.logprob]
    steps += 1
engine.close()
print(json.dumps([tokens, logprobs, engine.stats().free_blocks]))
"""
Answers = tuple[list[list[int]], list[list[float]]]


def answers(folder: Path, requests: list[Any], **config: Any) -> Answers:
    """Tokens and log probabilities; half of the requests come while the others decode."""
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(config | {"max_batched_tokens": 128})]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    tokens, logprobs, free = json.loads(done.stdout.splitlines()[-1])
    assert free == 200
    return tokens, logprobs


@pytest.fixture(scope="module", params=["llama-8b", "qwen3-0.6b"])
def model(request: pytest.FixtureRequest) -> tuple[Path, list[Any], Answers]:
    """(folder of a small model, requests, what one CPU answers in float32)"""
    if DEVICES < 2:
        pytest.skip(f"needs 2 CUDA devices, there are {DEVICES}")
    from safetensors.torch import save_file

    from bench.gpu_engine import SMALL, folder_of
    from engine.weights.load import load_model

    folder = folder_of(SMALL[request.param] | {"num_key_value_heads": 4})
    decoder, _ = load_model(folder, device="cuda", dummy_seed=7)
    weights = {name: place.destination.contiguous().cpu() for name, place in decoder.places().items()}
    save_file(weights, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 40, 1, 200, 333, 17, 64, 90, 16, 31, 32, 33, 12, 8, 70, 3]
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    prompts[-1] = [*prompts[4][:300], 1, 2, 3]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
    ]
    requests = [[prompt, {"max_tokens": 32, **kinds[i % 4]}] for i, prompt in enumerate(prompts)]
    return folder, requests, answers(folder, requests)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_and_logits_are_those_of_the_cpu(model: tuple[Path, list[Any], Answers], size: int) -> None:
    """Float32: eager steps, graphs of padded batches, steps computed ahead, and requests that are scored."""
    if size > DEVICES:
        pytest.skip(f"needs {size} CUDA devices, there are {DEVICES}")
    folder, requests, (tokens, logprobs) = model
    found, found_logprobs = answers(folder, requests, device="cuda", tensor_parallel=size)
    assert found == tokens
    for a, b in zip(found_logprobs, logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_in_bfloat16_are_near_those_of_float32(model: tuple[Path, list[Any], Answers], size: int) -> None:
    if size > DEVICES:
        pytest.skip(f"needs {size} CUDA devices, there are {DEVICES}")
    folder, requests, (_, logprobs) = model
    scored = [[prompt, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}] for prompt, _ in requests]
    _, found = answers(folder, scored, device="cuda", dtype="bfloat16", tensor_parallel=size)
    for i in range(2, len(requests), 4):
        want = torch.tensor(logprobs[i][: len(requests[i][0]) - 1])
        got = torch.tensor(found[i][: len(want)])
        assert (got - want).norm() <= 2e-2 * want.norm()
