"""What the scheduler computes and when, and how sequences end."""

from collections import Counter

import pytest
from fake_engine import BLOCK, EOS, FakeEngine, ask, next_token, reference

from engine.sequence import State

# Chunks, budget and order


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16, 64])
def test_tokens_do_not_depend_on_the_chunk_size(budget: int) -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=budget)
    requests = [ask(f"r{i}", list(range(i, i + 5 + 6 * i))) for i in range(5)]
    for request in requests:
        engine.add(request)
    engine.run()
    for request in requests:
        engine.assert_exact(request)
    engine.assert_idle()


def test_decodes_come_first_and_a_long_prompt_takes_what_is_left() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    engine.add(ask("short", [1, 2]))
    engine.step()
    engine.add(ask("long", list(range(30)), priority=-1))
    step = engine.step()
    assert [(e.sequence.request_id, e.start, e.num_tokens) for e in step.entries] == [("short", 2, 1), ("long", 0, 7)]
    step = engine.step()
    assert [(e.sequence.request_id, e.start, e.num_tokens) for e in step.entries] == [("short", 3, 1), ("long", 7, 7)]


def test_admission_follows_priority_then_arrival() -> None:
    engine = FakeEngine(max_running=1)
    for name, priority in (("late", 1), ("a", 0), ("b", 0), ("first", -1)):
        engine.add(ask(name, [1, 2, 3], max_tokens=2, priority=priority))
    engine.run()
    assert list(engine.ended) == ["first", "a", "b", "late"]


# How a sequence ends


def test_eos_counts_only_behind_min_tokens() -> None:
    prompt = next([n] for n in range(1000) if next_token([n]) == EOS)
    engine = FakeEngine()
    engine.add(ask("at once", prompt, eos_token_ids=(EOS,)))
    engine.add(ask("later", prompt, eos_token_ids=(EOS,), min_tokens=3))
    engine.add(ask("stop id", prompt, stop_token_ids=(EOS,)))
    engine.run()
    assert engine.outputs["at once"] == engine.outputs["stop id"] == [EOS]
    assert engine.ended["at once"].finish_reason == "stop" and engine.ended["at once"].stop_token_id == EOS
    assert len(engine.outputs["later"]) > 3 and EOS not in engine.outputs["later"][:3]


def test_an_end_token_within_min_tokens_does_not_end() -> None:
    engine = FakeEngine()
    sequence = engine.add(ask("r", [1], eos_token_ids=(EOS,), min_tokens=2))
    for _ in range(2):
        assert engine.scheduler.complete(engine.scheduler.schedule(0.0), {"r": EOS}) == [sequence]
        assert sequence.state is State.RUNNING
    engine.scheduler.complete(engine.scheduler.schedule(0.0), {"r": EOS})
    assert sequence.finish_reason == "stop"


def test_scoring_a_prompt_samples_nothing() -> None:
    engine = FakeEngine(max_batched_tokens=3)
    engine.add(ask("echo", list(range(10)), max_tokens=0))
    engine.run()
    assert engine.ended["echo"].finish_reason == "length" and "echo" not in engine.outputs
    assert engine.computed == 10
    engine.assert_idle()


def test_the_context_length_ends_a_sequence() -> None:
    engine = FakeEngine(max_model_len=12)
    request = ask("r", list(range(9)), max_tokens=100)
    engine.add(request)
    engine.run()
    engine.assert_exact(request)
    assert len(engine.outputs["r"]) == 3


def test_deadlines_end_waiting_and_running_sequences() -> None:
    engine = FakeEngine(max_running=1)
    engine.add(ask("running", [1], max_tokens=100, deadline=5.0))
    engine.add(ask("waiting", [1], max_tokens=100, deadline=5.0))
    engine.step(now=4.0)
    assert engine.scheduler.num_running == 1 and engine.scheduler.num_waiting == 1
    engine.step(now=6.0)
    assert {name: s.error for name, s in engine.ended.items()} == dict.fromkeys(
        ("running", "waiting"), "deadline exceeded"
    )
    assert all(s.finish_reason == "error" for s in engine.ended.values())
    engine.assert_idle()


def test_an_attempt_that_resumes_goes_on_behind_its_tokens() -> None:
    whole = ask("r", list(range(9)), max_tokens=8)
    expected, reason = reference(whole)
    engine = FakeEngine()
    engine.add(ask("r", list(range(9)), max_tokens=8, output_token_ids=expected[:5]))
    engine.run()
    assert engine.outputs["r"] == expected[5:] and engine.ended["r"].finish_reason == reason


# Prefix cache


def test_whole_prompt_cached_computes_only_the_last_block() -> None:
    """A prompt of exactly k blocks, again, and again with one more token."""
    engine = FakeEngine()
    prompt = list(range(3 * BLOCK))
    hits, computed = [], []
    for i, tokens in enumerate((prompt, prompt, [*prompt, 99])):
        before = engine.computed
        request = ask(f"r{i}", tokens, max_tokens=1)
        sequence = engine.add(request)
        engine.run()
        engine.assert_exact(request)
        hits.append(sequence.num_cached_tokens)
        computed.append(engine.computed - before)
    assert hits == [0, 2 * BLOCK, 3 * BLOCK]
    assert computed == [12, 4, 1]


def test_blocks_with_other_beginnings_are_not_shared() -> None:
    """Equal length and equal last block, but another start."""
    engine = FakeEngine()
    for name, first in (("A", 1), ("C", 2)):
        request = ask(name, [first] * BLOCK + [5] * BLOCK + [6], max_tokens=1)
        sequence = engine.add(request)
        engine.run()
        assert sequence.num_cached_tokens == 0
        engine.assert_exact(request)


def test_a_running_prefix_is_never_evicted() -> None:
    """Blocks in use stay under pressure."""
    engine = FakeEngine(num_blocks=6)
    holder = ask("holder", list(range(2 * BLOCK)), max_tokens=8)
    engine.add(holder)
    engine.step()
    kept = engine.scheduler.sequences["holder"].block_ids[:2]
    for i in range(6):
        engine.add(ask(f"noise{i}", [100 + i] * 10, max_tokens=1))
    while "holder" not in engine.ended:
        assert engine.scheduler.sequences["holder"].block_ids[:2] == kept
        engine.step()
    engine.assert_exact(holder)
    engine.run()
    engine.assert_idle()


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    engine = FakeEngine()
    for i, scores in enumerate((None, 0)):
        sequence = engine.add(ask(f"r{i}", list(range(9)), max_tokens=1, prompt_logprobs=scores))
        engine.run()
        assert sequence.num_cached_tokens == 0
    assert engine.computed == 18


# Preemption


def test_preemption_loses_and_doubles_no_token() -> None:
    """A pool too small for all; cached_tokens tells of the first admission only."""
    engine = FakeEngine(num_blocks=9, max_batched_tokens=64)
    requests = [ask(f"r{i}", [10 * i + k for k in range(7)], max_tokens=16) for i in range(3)]
    sequences = [engine.add(request) for request in requests]
    preempted = set()
    while engine.scheduler.has_work():
        running = {s.request_id for s in sequences if s.state is State.RUNNING}
        engine.step()
        preempted |= {s.request_id for s in sequences if s.state is State.WAITING} & running
    assert preempted and "r0" not in preempted  # never the best claim
    for request, sequence in zip(requests, sequences, strict=True):
        engine.assert_exact(request)
        assert sequence.num_cached_tokens == 0
    engine.assert_idle()


@pytest.mark.parametrize("comes", ["all", "some", "nothing"])
def test_what_a_preempted_sequence_had_is_fetched(comes: str) -> None:
    """It waits for room for all its tokens then. What does not come is computed; of either no more is asked."""
    engine = FakeEngine(num_blocks=9, max_batched_tokens=64)
    asked: list[int] = []
    engine.scheduler.rather_fetch = lambda tokens: asked.append(tokens) is None
    requests = [ask(f"r{i}", [10 * i + k for k in range(7)], max_tokens=16) for i in range(3)]
    sequences = {request.request_id: engine.add(request) for request in requests}
    outcomes, bare = Counter[str](), sum(7 + 15 for _ in requests)  # tokens that are computed at least
    while engine.scheduler.has_work(now=0.0):
        step = engine.step()
        outcomes += step.preempted
        for request in step.fetches:
            sequence = sequences[request.request_id]
            assert request.prompt_token_ids + request.output_token_ids == sequence.token_ids
            blocks = len(sequence.block_ids)
            assert sequence.state is State.RESERVED and blocks == (len(sequence.token_ids) - 1) // BLOCK
            if comes == "nothing":
                engine.scheduler.recompute(request.request_id)
            else:
                engine.commit_prefix(request.request_id, blocks if comes == "all" else blocks - 1)
        engine.pool.check()
    outcomes += engine.scheduler.schedule(0.0).preempted
    assert (
        asked and sum(outcomes.values()) >= 1 and set(outcomes) == {"recomputed" if comes == "nothing" else "swapped"}
    )
    assert (engine.computed < bare + BLOCK * outcomes["swapped"]) == (comes == "all")
    for request in requests:
        engine.assert_exact(request)
        assert sequences[request.request_id].num_cached_tokens == 0  # as at its first admission
    engine.assert_idle()


def test_the_lowest_priority_gives_way() -> None:
    engine = FakeEngine(num_blocks=6, max_batched_tokens=64)
    low = engine.add(ask("low", list(range(8)), max_tokens=12, priority=5))
    engine.step()
    high = ask("high", list(range(50, 58)), max_tokens=12, priority=0)
    engine.add(high)
    engine.run()
    assert list(engine.ended) == ["high", "low"]
    engine.assert_exact(high)
    engine.assert_exact(low.request)


def test_a_decode_preempted_within_a_step_is_not_computed() -> None:
    engine = FakeEngine(num_blocks=7, max_batched_tokens=16)
    weak = engine.add(ask("weak", list(range(4)), max_tokens=9, priority=1))
    engine.step()
    strong = engine.add(ask("strong", list(range(50, 77)), max_tokens=2, priority=0))
    steps = []
    while strong.state is not State.FINISHED:
        steps.append([entry.sequence.request_id for entry in engine.step().entries])
    assert steps[0] == ["weak", "strong"] and ["strong"] in steps and weak.state is State.WAITING
    engine.run()
    engine.assert_exact(strong.request)
    engine.assert_exact(weak.request)
    engine.assert_idle()


@pytest.mark.parametrize(("prompt_tokens", "reason"), [(6, "length"), (40, "error")])
def test_one_request_larger_than_the_pool_ends(prompt_tokens: int, reason: str) -> None:
    """It ends, the pool is whole, and the next request runs."""
    engine = FakeEngine(num_blocks=4, max_batched_tokens=8)
    sequence = engine.add(ask("big", list(range(prompt_tokens)), max_tokens=100))
    engine.run()
    assert sequence.finish_reason == reason
    if reason == "error":
        assert "do not fit the KV pool of 16 tokens" in (sequence.error or "")
    else:
        assert engine.outputs["big"] == reference(sequence.request)[0][: 17 - prompt_tokens]
    after = ask("after", [1, 2, 3])
    engine.add(after)
    engine.run()
    engine.assert_exact(after)
    engine.assert_idle()


# Abort


def test_abort_frees_blocks_at_any_state() -> None:
    engine = FakeEngine(max_running=2)
    engine.add(ask("held", [1, 2, 3]), hold=True)
    engine.step()
    assert engine.scheduler.reserve(engine.sequence(ask("reserved", [1, 2, 3, 4, 5])))
    engine.add(ask("running", [4, 5, 6], max_tokens=50))
    engine.step()
    engine.add(ask("waiting", [7, 8]))
    states = {name: sequence.state for name, sequence in engine.scheduler.sequences.items()}
    assert states == {name: State(name) for name in ("held", "reserved", "running", "waiting")}
    for name in states:
        aborted = engine.scheduler.abort(name)
        assert aborted is not None and aborted.finish_reason == "abort"
        assert engine.scheduler.abort(name) is None
    engine.run()
    assert set(engine.ended) == set(states)
    engine.assert_idle()


def test_abort_between_schedule_and_complete_drops_the_token() -> None:
    engine = FakeEngine()
    engine.add(ask("r", [1, 2, 3]))
    step = engine.scheduler.schedule(0.0)
    engine.scheduler.abort("r")
    assert engine.scheduler.complete(step, {"r": 1}) == []
    engine.run()
    engine.assert_idle()


def test_next_step_is_foreseen_and_kept() -> None:
    engine = FakeEngine(num_blocks=100, max_batched_tokens=8, foresees=True)
    engine.add(ask("a", [1, 2, 3], max_tokens=4))
    engine.step()
    assert [(e.sequence.request_id, e.start, e.num_tokens) for e, _ in engine.ahead] == [("a", 3, 1)]
    engine.add(ask("late", [4, 5], max_tokens=4))
    step = engine.step()  # what was foreseen, and nothing else; meanwhile the late prompt joined the one after
    assert [entry.sequence.request_id for entry in step.entries] == ["a"] and engine.kept == 1
    assert [(e.sequence.request_id, e.start, e.num_tokens) for e, _ in engine.ahead] == [("a", 4, 1), ("late", 0, 2)]
    engine.add(ask("long", list(range(40)), max_tokens=2))
    engine.step()
    assert [(e.sequence.request_id, e.num_tokens) for e, _ in engine.ahead] == [("a", 1), ("late", 1), ("long", 6)]
    engine.step()  # a's last token is sampled here: no entry is foreseen after it
    assert [(e.sequence.request_id, e.num_tokens) for e, _ in engine.ahead] == [("late", 1), ("long", 7)]
    engine.run()
    engine.assert_idle()


def test_what_was_foreseen_for_an_ended_sequence_is_dropped() -> None:
    engine = FakeEngine(num_blocks=100, foresees=True)
    for name in ("a", "b"):
        engine.add(ask(name, [1, 2, ord(name)], max_tokens=6))
    engine.step()
    engine.scheduler.abort("a")
    step = engine.step()
    assert [entry.sequence.request_id for entry in step.entries] == ["b"] and engine.kept == 1
    engine.run()
    engine.assert_idle()


def test_tokens_do_not_depend_on_foresight() -> None:
    requests = [ask(f"r{i}", [i % 3] * (1 + 5 * i % 17), max_tokens=1 + i % 9, eos_token_ids=(EOS,)) for i in range(40)]
    for foresees in (False, True):
        engine = FakeEngine(num_blocks=60, foresees=foresees)
        for i, request in enumerate(requests):
            engine.add(request)
            if i % 3 == 0:
                engine.step()
        engine.run()
        engine.assert_idle()
        for request in requests:
            engine.assert_exact(request)
        assert (engine.kept > 50) == foresees


def test_nothing_is_foreseen_where_somebody_may_have_to_give_way() -> None:
    engine = FakeEngine(num_blocks=6, max_batched_tokens=16, foresees=True)
    engine.add(ask("a", [1, 2, 3], max_tokens=4))
    engine.add(ask("b", [1, 2, 4], max_tokens=4))
    engine.step()
    assert not engine.ahead
    engine.run()
    engine.assert_idle()
