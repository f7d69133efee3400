"""The prefix cache on a tiny model: what is taken from it changes no bit, however long, full or contended it is."""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.engine import Engine, EngineConfig
from engine.request import Request, SamplingParams, TokenOutput

CONFIG = EngineConfig(num_blocks=80, block_size=8, max_batched_tokens=64, max_running=16, threads=1)


def built(folder: Path, **changes: int) -> Engine:
    return Engine.build(folder, msgspec.structs.replace(CONFIG, **changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(name: str, token_ids: list[int], max_tokens: int = 6) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    return Request(request_id=name, prompt_token_ids=token_ids, sampling=sampling)


def drain(engine: Engine) -> dict[str, list[TokenOutput]]:
    """Steps until there is nothing to do; outputs by request."""
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def run(engine: Engine, *requests: Request) -> list[list[TokenOutput]]:
    for request in requests:
        engine.add(request)
    outputs = drain(engine)
    assert engine.stats().free_blocks == engine.kv_cache.num_blocks
    return [outputs[request.request_id] for request in requests]


def scores(outputs: list[TokenOutput]) -> list[object]:
    """Tokens and log probabilities, bit by bit."""
    return [(output.token_ids, output.logprobs) for output in outputs]


def copied(source: Engine, held: list[int], target: Engine, into: list[int]) -> None:
    """KV of blocks, as a transfer leaves it."""
    for ours, theirs in zip(into, held, strict=True):
        target.kv_cache.block_bytes_view(ours)[:] = source.kv_cache.block_bytes_view(theirs)


@pytest.mark.parametrize("blocks", [40, 128, 300])
def test_a_long_prefix_is_right_to_its_last_block(llama_folder: Path, blocks: int) -> None:
    """Found here, taken from a peer that has it, and computed by a peer: as if computed here."""
    holder, taker, decoder = (built(llama_folder, block_size=2, num_blocks=320) for _ in range(3))
    ids = prompt(2 * blocks + 1, blocks)
    (cold,) = run(holder, ask("cold", ids))
    (warm,) = run(holder, ask("warm", ids))
    assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 2 * blocks)
    assert scores(warm) == scores(cold)

    assert holder.hold_cached(ask("lend", ids)) == 2 * blocks
    reservation = taker.reserve(ask("fetched", ids), prefix_tokens=2 * blocks)
    assert reservation is not None and len(reservation.block_ids) == blocks
    copied(holder, holder.held_blocks("lend"), taker, reservation.block_ids)
    holder.release("lend")
    assert taker.commit_prefix("fetched", blocks)
    fetched = drain(taker)["fetched"]
    assert fetched[0].cached_tokens == 2 * blocks and scores(fetched) == scores(cold)

    reservation = decoder.reserve(ask("moved", ids))
    assert reservation is not None
    holder.add(ask("moved", ids), hold=True)
    (first,) = drain(holder)["moved"]
    copied(holder, holder.held_blocks("moved"), decoder, reservation.block_ids)
    holder.release("moved")
    assert first.logprobs is not None and decoder.commit_handoff("moved", first.token_ids[0], first.logprobs[0])
    assert scores(drain(decoder)["moved"]) == scores(cold)


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_prompt_that_is_cached_as_a_whole(llama_folder: Path, blocks: int) -> None:
    """Its last token's logits are computed; one token more finds all of its blocks, and each chain goes on."""
    engine, fresh = built(llama_folder), built(llama_folder)
    ids = prompt(8 * blocks, 1)
    for name, asked, cached in (
        ("first", ids, 0),
        ("again", ids, 8 * (blocks - 1)),
        ("one more", [*ids, 7], 8 * blocks),
        ("one less", ids[:-1], 8 * (blocks - 1)),
        ("a block more", [*ids, *prompt(8, 2), 7], 8 * blocks),
        ("a block more again", [*ids, *prompt(8, 2), 7], 8 * (blocks + 1)),
    ):
        (found,) = run(engine, ask(name, asked, max_tokens=1))
        (expected,) = run(fresh, ask(name, asked, max_tokens=1))
        fresh.clear_cache()
        assert (name, found[0].cached_tokens) == (name, cached)
        assert scores(found) == scores(expected), name


def test_answers_are_those_without_a_cache(llama_folder: Path) -> None:
    """16 long prompts twice, with room for all of them and with room for a few; nobody's blocks are another's."""
    asked = [ask(str(number), prompt(512 - number, 30 + number), max_tokens=8) for number in range(16)]
    without = built(llama_folder, max_batched_tokens=512)
    expected = []
    for request in asked:
        without.clear_cache()
        expected += run(without, request)
    assert all(outputs[0].cached_tokens == 0 for outputs in expected)
    whole = [(512 - number - 1) // 8 * 8 for number in range(16)]
    roomy = built(llama_folder, num_blocks=16 * 66, max_batched_tokens=512)
    tight = built(llama_folder, num_blocks=150, max_batched_tokens=512, max_running=4)
    for engine in (roomy, tight):
        for order in (asked, asked[::-1]):
            found = {outputs[0].request_id: outputs for outputs in run(engine, *order)}
            assert [scores(found[request.request_id]) for request in asked] == [scores(each) for each in expected]
        cached = [found[request.request_id][0].cached_tokens for request in asked]
        assert cached == whole if engine is roomy else 0 < sum(cached) < sum(whole)


def test_who_is_preempted_resumes_with_what_is_cached(llama_folder: Path) -> None:
    """Tokens are right, and the prefix that was found at first is told once and for all."""
    shared = prompt(32, 3)
    asked = [ask(str(number), [*shared, *prompt(3 + number, 40 + number)], max_tokens=40) for number in range(5)]
    roomy = built(llama_folder)
    run(roomy, ask("before", [*shared, 5], max_tokens=1))
    expected = [run(roomy, request)[0] for request in asked]
    tight = built(llama_folder, num_blocks=16)
    run(tight, ask("before", [*shared, 5], max_tokens=1))
    preempted = 0
    original = tight._scheduler._preempt

    def count(sequence: object) -> None:
        nonlocal preempted
        preempted += 1
        original(sequence)  # type: ignore[arg-type]

    tight._scheduler._preempt = count  # type: ignore[method-assign]
    found = run(tight, *asked)
    assert preempted
    assert [scores(outputs) for outputs in found] == [scores(outputs) for outputs in expected]
    assert {output.cached_tokens for outputs in found for output in outputs} == {32}
