"""The engine on a tiny model: steps, handoff, isolation of requests, and failures."""

import shutil

import msgspec
import pytest
import torch

from engine.engine import Engine, EngineConfig
from engine.request import BlockRemoved, BlockStored, Request, SamplingParams

CONFIG = EngineConfig(num_blocks=64, block_size=8, max_batched_tokens=24, max_running=8, threads=1)


@pytest.fixture(scope="module")
def engine(llama_folder):
    return Engine.build(llama_folder, CONFIG)


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.on_layers = None
        drain(engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, CONFIG.num_blocks)


def prompt(length, seed=0):
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name, prompt_token_ids, output=(), **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 8} | sampling
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt_token_ids),
        output_token_ids=list(output),
        sampling=SamplingParams(**sampling),
    )


def drain(engine):
    """Steps until there is nothing to do; outputs by request."""
    outputs = {}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def run(engine, *requests):
    for one in requests:
        engine.add(one)
    outputs = drain(engine)
    return [outputs[one.request_id] for one in requests]


def test_outputs_are_contiguous_and_end_once(engine):
    (outputs,) = run(engine, request("a", prompt(30), max_tokens=5, logprobs=2))
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert all(len(o.logprobs) == 1 and o.logprobs[0].token_id == o.token_ids[0] for o in outputs)
    assert all(len(o.logprobs[0].top) == 2 and o.logprobs[0].top[0][0] == o.token_ids[0] for o in outputs)


def test_stop_tokens_end_and_are_named(engine):
    (outputs,) = run(engine, request("a", prompt(20), max_tokens=8))
    third = tokens(outputs)[2]
    first_at = tokens(outputs).index(third)
    (stopped,) = run(engine, request("b", prompt(20), max_tokens=8, stop_token_ids=(third,)))
    assert len(tokens(stopped)) == first_at + 1
    assert (stopped[-1].finish_reason, stopped[-1].stop_token_id) == ("stop", third)
    (longer,) = run(engine, request("c", prompt(20), max_tokens=8, eos_token_ids=(third,), min_tokens=6))
    assert third not in tokens(longer)[:6]


def test_a_request_gives_the_same_bits_alone_and_in_company(engine):
    ours = request("ours", prompt(45, 1), max_tokens=12, logprobs=3)
    sampled = request("sampled", prompt(17, 2), max_tokens=12, logprobs=3, temperature=0.9, top_p=0.9, seed=5)
    alone = [run(engine, one)[0] for one in (ours, sampled)]
    engine.clear_cache()
    others = [request(f"other-{i}", prompt(5 + 9 * i, 10 + i), max_tokens=3 + i, temperature=i % 2) for i in range(6)]
    together = run(engine, others[0], ours, *others[1:4], sampled, *others[4:])
    for before, after in zip(alone, (together[1], together[5]), strict=True):
        assert [o.logprobs for o in before] == [o.logprobs for o in after]


def test_chunks_of_any_size_change_no_bit(llama_folder):
    """The same logits for the prompt and behind it, also where a stream leaves room for small chunks only."""
    ours = request("ours", prompt(40, 8), max_tokens=4, logprobs=2, prompt_logprobs=2)
    expected = None
    for size in (64, *range(1, 18)):
        for mixed in (False, True):
            limits = {"max_mixed_prefill_tokens": size} if mixed else {"max_batched_tokens": size}
            engine = Engine.build(llama_folder, msgspec.structs.replace(CONFIG, **limits))
            if mixed:
                engine.add(request("stream", prompt(5), max_tokens=8 + 40 // size))  # outlasts ours
                engine.step()
            (outputs,) = run(engine, ours)
            got = [(o.logprobs, o.prompt_logprobs) for o in outputs]
            expected = expected or got
            assert len(got) == 4 and got == expected, (size, mixed)


def test_prefix_hits_are_reported_and_change_no_bit(engine):
    engine.clear_cache()
    shared = prompt(40, 3)
    (cold,) = run(engine, request("cold", [*shared, 7], logprobs=2))
    (warm,) = run(engine, request("warm", [*shared, 7], logprobs=2))
    assert cold[0].cached_tokens == 0 and warm[0].cached_tokens == 40
    assert [o.logprobs for o in cold] == [o.logprobs for o in warm]
    salted = request("salted", [*shared, 7])
    salted.cache_salt = "tenant"
    assert run(engine, salted)[0][0].cached_tokens == 0


def test_events_mirror_the_cache(llama_folder):
    engine = Engine.build(llama_folder, CONFIG)
    known = set()
    for i in range(12):  # more than fits
        engine.add(request(f"r{i}", prompt(60, i)))
        while engine.has_work():
            for event in engine.step().events:
                match event:
                    case BlockStored(hashes):
                        known.update(hashes)
                    case BlockRemoved(hashes):
                        known.difference_update(hashes)
        assert known == set(engine.snapshot_hashes())


def test_prompt_logprobs_over_chunks(engine, llama_folder):
    ids = prompt(60, 4)
    (outputs,) = run(engine, request("p", ids, prompt_logprobs=2, max_tokens=3))
    given = outputs[0].prompt_logprobs
    assert given[0] is None and len(given) == 60 and outputs[1].prompt_logprobs is None
    assert [entry.token_id for entry in given[1:]] == ids[1:]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    for position, entry in enumerate(given[1:]):
        assert entry.logprob == pytest.approx(float(expected[position, ids[position + 1]]), abs=1e-3)
        assert entry.top[0][1] == pytest.approx(float(expected[position].max()), abs=1e-3)

    (resumed,) = run(engine, request("q", ids, tokens(outputs)[:1], prompt_logprobs=2, max_tokens=3))
    assert all(output.prompt_logprobs is None for output in resumed)
    (prompt_only,) = run(engine, request("s", ids, prompt_logprobs=0, max_tokens=0))
    assert [o.finish_reason for o in prompt_only] == ["length"] and len(prompt_only[0].prompt_logprobs) == 60
    assert prompt_only[0].token_ids == []


def test_abort_ends_at_any_state(engine):
    engine.add(request("a", prompt(60), max_tokens=50))
    engine.abort("a")
    assert drain(engine)["a"][-1].finish_reason == "abort"
    engine.add(request("b", prompt(60), max_tokens=50))
    for _ in range(5):
        engine.step()
    engine.abort("b")
    engine.abort("unknown")
    (last,) = drain(engine)["b"]
    assert (last.finish_reason, last.token_ids) == ("abort", [])
    engine.add(request("c", prompt(20)), hold=True)
    drain(engine)
    engine.abort("c")
    assert drain(engine)["c"][-1].finish_reason == "abort"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("x", []), "empty"),
        (request("x", [1, 512]), "between 0 and 511"),
        (request("x", [1], output=[-1]), "between"),
        (request("x", [1], logit_bias={9999: 1.0}), "between"),
        (request("x", [1] * 1024), "1024 tokens"),
        (request("x", [1] * 600), "no room in the 512"),
    ],
)
def test_what_cannot_run_ends_with_a_reason(engine, bad, words):
    with pytest.raises(ValueError, match=words):
        engine.reserve(bad)
    (output,) = run(engine, bad)[0]
    assert output.finish_reason == "error" and words in output.error and output.token_ids == []


def test_an_id_in_use_is_refused(engine):
    engine.add(request("a", prompt(5)))
    with pytest.raises(ValueError, match="a is in the engine"):
        engine.add(request("a", prompt(5)))


def test_a_failing_step_ends_its_requests_and_nothing_else(engine):
    def explode(layers, entries):
        if any(entry.sequence.request_id == "bad" for entry in entries):
            raise RuntimeError("boom")

    (expected,) = run(engine, request("fine", prompt(20)))
    engine.on_layers = explode
    engine.add(request("bad", prompt(30)))
    assert [(o.finish_reason, "boom" in o.error) for o in drain(engine)["bad"]] == [("error", True)]
    (after,) = run(engine, request("fine", prompt(20)))
    assert tokens(after) == tokens(expected)


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_aborted_inside_a_step_ends_once(engine, fails):
    """Its id may be in use again when the step is booked."""

    def call(layers, entries):
        if 1 in layers and any(entry.sequence.request_id == "gone" for entry in entries):
            engine.on_layers = None
            engine.abort("gone")
            engine.add(request("gone", prompt(9), max_tokens=3))
            if fails:
                raise RuntimeError("boom")

    (expected,) = run(engine, request("gone", prompt(9), max_tokens=3))
    engine.on_layers = call
    engine.add(request("gone", prompt(12, 5), prompt_logprobs=0))
    engine.add(request("beside", prompt(10, 6)))
    found = drain(engine)
    assert [o.finish_reason for o in found["gone"] if o.finish_reason] == ["abort", "length"]
    assert tokens(found["gone"]) == tokens(expected)
    assert (found["beside"][-1].error is not None) == fails
    assert engine.orphaned_blocks([]) == 0


def test_numbers_that_are_none_fail_their_request_alone(llama_folder):
    engine = Engine.build(llama_folder, CONFIG)
    engine._runner.model.embedding.weight.data[500] = torch.nan
    bad, good = run(engine, request("bad", [500, 4, 5]), request("good", prompt(9)))
    assert bad[-1].finish_reason == "error" and "finite" in bad[-1].error
    assert good[-1].finish_reason == "length" and len(tokens(good)) == 8


def test_layers_are_announced_with_their_step(engine):
    seen = []
    engine.on_layers = lambda layers, entries: seen.append((layers.start, entries[0].end))
    run(engine, request("a", prompt(30, 9), max_tokens=1))
    assert seen == [(layer, end) for end in (24, 30) for layer in range(3)]


def hand_off(source, target, one):
    """Prefill on `source`, KV copied into what `target` reserved, decode on `target`; all output tokens."""
    reservation = target.reserve(one)
    source.add(one, hold=True)
    (first,) = drain(source)[one.request_id]
    held = source.held_blocks(one.request_id)
    assert len(held) == len(reservation.block_ids) == len(reservation.generations)
    for i in range(reservation.num_cached_blocks, len(held)):
        target.kv_cache.block_bytes_view(reservation.block_ids[i])[:] = source.kv_cache.block_bytes_view(held[i])
    source.release(one.request_id)
    assert target.commit_handoff(one.request_id, first.token_ids[0], first.logprobs and first.logprobs[0])
    outputs = drain(target)[one.request_id]
    assert outputs[0].token_ids == first.token_ids and outputs[0].index == first.index
    return outputs


def test_handoff_equals_local_and_fills_both_caches(llama_folder, engine):
    source, target = Engine.build(llama_folder, CONFIG), Engine.build(llama_folder, CONFIG)
    for one in (
        request("g", prompt(45, 6), logprobs=1),
        request("s", prompt(45, 6)[:37], logprobs=1, temperature=1.0, seed=3, frequency_penalty=0.4),
    ):
        (expected,) = run(engine, one)
        outputs = hand_off(source, target, one)
        assert [o.logprobs for o in outputs] == [o.logprobs for o in expected]
        assert [o.index for o in outputs] == list(range(8)) and outputs[-1].finish_reason == "length"
    for side in (source, target):
        assert side.stats().free_blocks == CONFIG.num_blocks and not side.has_work()
    assert target.reserve(request("again", prompt(45, 6))).num_cached_tokens == 40


def test_handoff_that_ends_with_its_first_token(llama_folder, engine):
    source = Engine.build(llama_folder, CONFIG)
    (output,) = hand_off(source, engine, request("one", prompt(20, 8), max_tokens=1))
    assert output.finish_reason == "length"


def test_a_prefix_of_a_peer_joins_and_the_rest_is_computed(llama_folder, engine):
    source = Engine.build(llama_folder, CONFIG)
    one = request("a", prompt(45, 6), logprobs=1)
    (expected,) = run(engine, one)
    engine.clear_cache()
    run(source, request("before", prompt(45, 6)[:37], max_tokens=1))
    size = CONFIG.block_size
    held_tokens = source.hold_cached(request("fetch", prompt(45, 6)))
    held = source.held_blocks("fetch")
    assert held_tokens == len(held) * size == 37 // size * size
    reservation = engine.reserve(one, prefix_tokens=44)
    assert len(reservation.block_ids) == 44 // size
    for ours, theirs in zip(reservation.block_ids, held, strict=False):
        engine.kv_cache.block_bytes_view(ours)[:] = source.kv_cache.block_bytes_view(theirs)
    assert engine.commit_prefix("a", len(held)) and not engine.commit_prefix("a", len(held))
    outputs = drain(engine)["a"]
    assert [o.logprobs for o in outputs] == [o.logprobs for o in expected]
    assert outputs[-1].cached_tokens == held_tokens
    source.release("fetch")
    assert source.hold_cached(request("unknown", prompt(45, 9))) == 0 and source.held_blocks("unknown") == []
    for side in (source, engine):
        assert side.stats().free_blocks == CONFIG.num_blocks and not side.has_work()


def test_failed_handoffs_recompute_or_end(engine):
    (expected,) = run(engine, request("a", prompt(30, 5)))
    engine.clear_cache()
    engine.reserve(request("a", prompt(30, 5)))
    assert engine.stats().blocks["transfer"] == 4
    assert engine.recompute("a") and not engine.commit_handoff("a", 1)
    assert tokens(drain(engine)["a"]) == tokens(expected)

    engine.clear_cache()
    engine.reserve(request("b", prompt(30, 5)))
    detached = engine.detach("b", then_wait=True)
    assert tokens(drain(engine)["b"]) == tokens(expected)
    assert engine.stats().free_blocks == CONFIG.num_blocks - len(detached) == CONFIG.num_blocks - 4
    engine.release_blocks(detached)

    engine.clear_cache()
    engine.reserve(request("c", prompt(30, 5)))
    detached = engine.detach("c", then_wait=False)
    assert [o.finish_reason for o in drain(engine)["c"]] == ["abort"]
    engine.release_blocks(detached)
    assert not engine.recompute("unknown") and engine.held_blocks("unknown") == []


def test_no_room_to_reserve(engine):
    assert engine.reserve(request("big", prompt(500))) is not None
    assert engine.reserve(request("late", prompt(60))) is None
    engine.abort("big")


def test_fingerprint_and_dummy_weights(llama_folder, tmp_path):
    shutil.copy(llama_folder / "config.json", tmp_path)
    one, two = (Engine.build(tmp_path, CONFIG.__class__(num_blocks=8, dummy_seed=seed)) for seed in (1, 2))
    assert len({one.fingerprint, two.fingerprint, Engine.build(llama_folder, CONFIG).fingerprint}) == 3
    again = Engine.build(tmp_path, EngineConfig(num_blocks=8, dummy_seed=1))
    assert run(one, request("a", prompt(9)))[0] == run(again, request("a", prompt(9)))[0]
