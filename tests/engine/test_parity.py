"""The engine's tokens against transformers', and against themselves by every way a request can take."""

import msgspec
import pytest
import torch
import transformers

from engine.engine import Engine, EngineConfig
from engine.request import Request, SamplingParams
from engine.weights.resolve import resolve

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def smollm2_folder():
    return resolve()


def prompts_of(vocab_size, count=20, longest=90):
    """Prompts of mixed lengths; every third continues an earlier one, so that prefixes hit."""
    generator = torch.Generator().manual_seed(5)
    prompts = []
    for i in range(count):
        length = int(torch.randint(2, longest // 2, (1,), generator=generator))
        tokens = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        prompts.append(prompts[i // 2] + tokens[: longest - len(prompts[i // 2])] if i % 3 == 2 else tokens)
    return prompts


def transformers_tokens(folder, prompts):
    """Greedy tokens of a static, left-padded batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, width:].tolist()


def run(engine, requests):
    """Output tokens by request id; requests are added two a step, so that prompts and decodes mix."""
    waiting = list(requests)
    tokens = {request.request_id: list(request.output_token_ids) for request in requests}
    while waiting or engine.has_work():
        for request in waiting[:2]:
            engine.add(request)
        del waiting[:2]
        for output in engine.step().outputs:
            assert output.error is None and output.index == len(tokens[output.request_id])
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3", "llama"])
def test_greedy_tokens_equal_transformers(family, request):
    folder = request.getfixturevalue(f"{family}_folder")
    engine = Engine.build(folder, EngineConfig(num_blocks=400, max_batched_tokens=48, max_running=32))
    # A real model is large, and a wrong weight shows in any prompt; the small ones are for how steps are mixed.
    prompts = prompts_of(engine.vocab_size, count=8 if family == "smollm2" else 20)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    ours = run(
        engine,
        [Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling) for i, prompt in enumerate(prompts)],
    )
    assert engine.stats().free_blocks == 400
    expected = transformers_tokens(folder, prompts)
    assert [ours[str(i)] for i in range(len(prompts))] == expected


BASE = EngineConfig(num_blocks=200, block_size=8, max_batched_tokens=512, max_running=32)
WAYS = {
    "small chunks": msgspec.structs.replace(BASE, max_batched_tokens=7),
    "chunks across blocks": msgspec.structs.replace(BASE, max_batched_tokens=29, block_size=16),
    "preempted": msgspec.structs.replace(BASE, num_blocks=36, max_batched_tokens=40),
    "one at a time": msgspec.structs.replace(BASE, max_running=1),
}
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.1},
    {"temperature": 1.2, "top_k": 50, "seed": 13, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 40, "eos_token_ids": (2, 5, 9)},
]


def mixed_requests(engine):
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=48, **SAMPLINGS[i % len(SAMPLINGS)]),
        )
        for i, prompt in enumerate(prompts_of(engine.vocab_size))
    ]


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def reference(request):
    """(folder, tokens of the mixed requests)"""
    folder = request.getfixturevalue(f"{request.param}_folder")
    engine = Engine.build(folder, BASE)
    return folder, run(engine, mixed_requests(engine))


@pytest.mark.parametrize("way", WAYS)
def test_scheduling_changes_no_token(reference, way):
    folder, expected = reference
    engine = Engine.build(folder, WAYS[way])
    asked = mixed_requests(engine)
    if way == "one at a time":  # as many steps as tokens: half of the requests have each sampling twice, and prefixes
        asked = asked[:10]
    expected = {request.request_id: expected[request.request_id] for request in asked}
    preempted = 0
    original = engine._scheduler._preempt

    def count(sequence):
        nonlocal preempted
        preempted += 1
        original(sequence)

    engine._scheduler._preempt = count
    assert run(engine, asked) == expected
    assert (preempted > 3) == (way == "preempted")
    # Once more, now over what the first time left in the cache.
    assert run(engine, asked) == expected


def test_resuming_behind_given_tokens_changes_no_token(reference):
    folder, expected = reference
    engine = Engine.build(folder, BASE)
    resumed = [
        msgspec.structs.replace(request, output_token_ids=expected[request.request_id][: 1 + 7 * i % 40])
        for i, request in enumerate(mixed_requests(engine))
        if len(expected[request.request_id]) > 40
    ]
    assert len(resumed) > 10
    assert run(engine, resumed) == {request.request_id: expected[request.request_id] for request in resumed}


def test_moving_the_kv_changes_no_token(reference):
    folder, expected = reference
    prefill, decode = Engine.build(folder, BASE), Engine.build(folder, BASE)
    tokens = {}
    waiting = mixed_requests(prefill)
    reserved = {}
    while waiting or reserved or decode.has_work() or prefill.has_work():
        for request in waiting[:2]:
            reserved[request.request_id] = decode.reserve(request)
            prefill.add(request, hold=True)
        del waiting[:2]
        for output in prefill.step().outputs:
            reservation, held = reserved.pop(output.request_id), prefill.held_blocks(output.request_id)
            for i in range(reservation.num_cached_blocks, len(held)):
                target = decode.kv_cache.block_bytes_view(reservation.block_ids[i])
                target[:] = prefill.kv_cache.block_bytes_view(held[i])
            prefill.release(output.request_id)
            assert decode.commit_handoff(output.request_id, output.token_ids[0])
        for output in decode.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == expected
    assert decode.stats().free_blocks == prefill.stats().free_blocks == BASE.num_blocks
