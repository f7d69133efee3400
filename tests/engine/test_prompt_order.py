"""Which prompt is computed next, how long it can be overtaken, and what a step with decodes may hold."""

from fake_engine import BLOCK, FakeEngine, ask
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prompt_order import WINDOW
from engine.sequence import State
from engine.step import Step


def tokens(step: Step) -> dict[str, int]:
    return {entry.sequence.request_id: entry.num_tokens for entry in step.entries}


# Order


def test_the_shortest_prompt_goes_first() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    for name, length in (("long", 30), ("middle", 10), ("short", 5), ("as short", 5)):
        engine.add(ask(name, list(range(length)), max_tokens=1))
    assert tokens(engine.step()) == {"short": 5, "as short": 3}
    assert tokens(engine.step()) == {"as short": 2, "middle": 6}


def test_a_short_prompt_does_not_wait_for_a_long_one_under_way() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    engine.add(ask("long", list(range(100)), max_tokens=1))
    engine.step()
    engine.add(ask("short", [1, 2, 3], max_tokens=1))
    assert tokens(engine.step()) == {"short": 3, "long": 5}


def test_tokens_left_count_not_the_length() -> None:
    """Neither what is computed already nor what is cached has to be waited for."""
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    known = list(range(8 * BLOCK))
    engine.add(ask("first", known, max_tokens=1))
    engine.run()
    engine.add(ask("middle", list(range(50, 60)), max_tokens=1))
    engine.add(ask("mostly cached", [*known, 99], max_tokens=1))
    assert tokens(engine.step()) == {"mostly cached": 1, "middle": 7}
    engine.add(ask("newcomer", [7, 7, 7, 7], max_tokens=1))
    assert tokens(engine.step()) == {"middle": 3, "newcomer": 4}


def test_a_prefix_that_is_cached_while_a_prompt_waits_counts() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    prefix = list(range(6 * BLOCK))
    engine.add(ask("first", prefix, max_tokens=1))
    engine.step()
    engine.add(ask("same", [*prefix, 1, 2], max_tokens=1))
    engine.add(ask("other", list(range(50, 67)), max_tokens=1))
    steps = [tokens(engine.step()) for _ in range(3)]
    assert steps == [{"first": 8}, {"first": 8}, {"same": 2, "other": 6}]


def test_an_evicted_prefix_counts_no_more() -> None:
    engine = FakeEngine(num_blocks=10, max_batched_tokens=8)
    prefix = list(range(6 * BLOCK))
    engine.add(ask("first", prefix, max_tokens=1))
    engine.run()
    waiting = engine.add(ask("waiting", [*prefix, 1], max_tokens=1))
    engine.scheduler._order.sort([waiting])
    assert waiting.found_blocks == 6
    engine.pool.release(engine.pool.allocate(8))
    engine.scheduler._order.sort([waiting])
    assert waiting.found_blocks == engine.pool.match(waiting.hashes) == 2
    engine.run()
    engine.assert_exact(waiting.request)


def test_priority_comes_before_length_and_none_means_arrival() -> None:
    for max_overtaking, expected in ((4, ["urgent", "short", "long"]), (0, ["urgent", "long", "short"])):
        engine = FakeEngine(max_running=1, max_overtaking=max_overtaking)
        engine.add(ask("long", list(range(20)), max_tokens=1))
        engine.add(ask("short", [1], max_tokens=1))
        engine.add(ask("urgent", list(range(50, 80)), max_tokens=1, priority=-1))
        engine.run()
        assert list(engine.ended) == expected


def test_a_stream_that_stalls_goes_before_new_prompts() -> None:
    """A sequence whose client has tokens is longer than what waits, and came later."""
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    engine.add(ask("new", [1, 2, 3], max_tokens=1))
    engine.add(ask("resumed", list(range(12)), max_tokens=4, output_token_ids=[5]))
    assert tokens(engine.step()) == {"resumed": 8}


def test_the_first_prompts_of_a_deep_queue_compete() -> None:
    """To look at all of thousands would cost each step too much; these are best by priority and arrival."""
    engine = FakeEngine(num_blocks=64, max_batched_tokens=8)
    for number in range(WINDOW):
        engine.add(ask(f"r{number}", [number] * 9, max_tokens=1))
    engine.add(ask("short", [1], max_tokens=1))
    engine.add(ask("urgent", [1000] * 6, max_tokens=1, priority=-1))
    assert tokens(engine.step()) == {"urgent": 6, "r0": 2}
    assert tokens(engine.step()) == {"short": 1, "r0": 7}


# Nobody starves


def test_a_long_prompt_gives_way_for_a_known_time_only() -> None:
    """Short prompts arrive as fast as they are computed, for ever."""
    engine = FakeEngine(num_blocks=200, max_batched_tokens=8, max_overtaking=3)
    long = engine.add(ask("long", list(range(40)), max_tokens=1))
    overtaken = 0
    while "long" not in engine.ended:
        assert overtaken < 1000
        engine.add(ask(f"short {engine.arrivals}", [engine.arrivals] * 8, max_tokens=1))
        overtaken += sum(count for name, count in tokens(engine.step()).items() if name != "long")
    assert overtaken == 3 * (40 - 8)
    engine.run()
    engine.assert_exact(long.request)
    engine.assert_idle()


arrivals = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    budget=st.integers(1, 20),
    max_overtaking=st.integers(0, 5),
    limit=st.sampled_from([1, 2, 6, 10_000]),
)
def test_overtaking_is_bounded(
    arrivals: list[tuple[int, int, int]], budget: int, max_overtaking: int, limit: int
) -> None:
    """Counted by hand: tokens of later prompts that were computed while a prompt was not done, with blocks for all."""
    engine = FakeEngine(
        num_blocks=1000,
        max_batched_tokens=budget,
        max_running=100,
        max_overtaking=max_overtaking,
        max_mixed_prefill_tokens=limit,
    )
    sequences, overtaken = [], []
    for number, (gap, length, max_tokens) in enumerate([*arrivals, (10_000, 0, 0)]):
        while gap and engine.scheduler.has_work(now=0.0):
            gap -= 1
            before = {s: s.num_uncomputed_tokens for s in sequences}
            step = engine.step()
            for i, sequence in enumerate(sequences):
                if sequence.num_output_tokens == 0:
                    later = [e for e in step.entries if e.sequence.arrival > sequence.arrival]
                    overtaken[i] += sum(e.num_tokens for e in later if before[e.sequence] > 1)
        if length:
            prompt = [(17 * number + 3 * i) % 50 for i in range(length)]
            sequences.append(engine.add(ask(f"r{number}", prompt, max_tokens=max_tokens)))
            overtaken.append(0)
    engine.assert_idle()
    for sequence, count in zip(sequences, overtaken, strict=True):
        engine.assert_exact(sequence.request)
        assert count <= max_overtaking * sequence.num_prompt_tokens + (budget if max_overtaking else 0)


# What a step with decodes holds


def test_prompts_beside_decodes_keep_to_their_limit() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=16, max_mixed_prefill_tokens=3)
    engine.add(ask("prompt", list(range(20)), max_tokens=1))
    assert tokens(engine.step()) == {"prompt": 16}  # nobody decodes
    engine.add(ask("stream", [1, 2], max_tokens=9))
    engine.run()
    engine.add(ask("stream 2", [1, 2], max_tokens=9))
    engine.step()
    engine.add(ask("prompt 2", list(range(50, 70)), max_tokens=1))
    for _ in range(3):
        assert tokens(engine.step()) == {"stream 2": 1, "prompt 2": 3}


def test_a_failed_transfer_is_computed_beside_the_streams_in_small_chunks() -> None:
    engine = FakeEngine(num_blocks=64, max_batched_tokens=16, max_mixed_prefill_tokens=4)
    for name in ("stream", "fails"):
        assert engine.scheduler.reserve(engine.sequence(ask(name, list(range(len(name), 30)), max_tokens=40)))
    engine.commit("stream")
    assert tokens(engine.step()) == {"stream": 1}
    assert engine.scheduler.recompute("fails") is not None
    assert [tokens(engine.step()) for _ in range(2)] == [{"stream": 1, "fails": 4}] * 2
    engine.run()
    for name in ("stream", "fails"):
        engine.assert_exact(ask(name, list(range(len(name), 30)), max_tokens=40))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=12))
def test_handoffs_bring_no_prompt_token_into_a_step(handoffs: list[tuple[int, int, int]]) -> None:
    """A decode worker whose transfers succeed and whose blocks suffice."""
    engine = FakeEngine(num_blocks=400, max_running=100)
    requests = []
    for number, (length, max_tokens, steps) in enumerate(handoffs):
        requests.append(ask(f"r{number}", [(number + i) % 9 for i in range(length)], max_tokens=max_tokens))
        assert engine.scheduler.reserve(engine.sequence(requests[-1]))
        for _ in range(steps):
            assert all(e.num_tokens == 1 and e.start >= e.sequence.num_prompt_tokens for e in engine.step().entries)
        engine.commit(f"r{number}")
    while engine.scheduler.has_work(now=0.0):
        assert all(e.num_tokens == 1 and e.start >= e.sequence.num_prompt_tokens for e in engine.step().entries)
    for request in requests:
        engine.assert_exact(request)
    engine.assert_idle()


# Blocks


def test_no_prompt_is_admitted_into_blocks_that_an_earlier_one_under_way_needs() -> None:
    engine = FakeEngine(num_blocks=9, max_batched_tokens=8)
    engine.add(ask("long", list(range(32)), max_tokens=2))
    engine.step()
    engine.add(ask("short", [1, 2, 3], max_tokens=1))
    while "long" not in engine.ended:
        assert engine.step().entries
        assert "long" in engine.ended or engine.scheduler.sequences["long"].state is State.RUNNING
    engine.run()
    assert list(engine.ended) == ["long", "short"] and engine.computed == 32 + 1 + 3  # nothing twice
    engine.assert_idle()


def test_no_reservation_takes_blocks_that_an_earlier_prompt_under_way_needs() -> None:
    engine = FakeEngine(num_blocks=9, max_batched_tokens=8)
    engine.add(ask("long", list(range(32)), max_tokens=2))
    engine.step()
    assert engine.pool.num_free == 7
    assert not engine.scheduler.reserve(engine.sequence(ask("landing", list(range(50, 58)))))
    assert engine.scheduler.reserve(engine.sequence(ask("urgent", list(range(50, 58)), priority=-1)))


def test_a_prompt_that_finds_no_room_closes_admission() -> None:
    """Else the blocks that it waits for would go to small ones, one after the other."""
    engine = FakeEngine(num_blocks=6, max_batched_tokens=64, max_overtaking=0)
    engine.add(ask("running", list(range(8)), max_tokens=5))
    engine.step()
    engine.add(ask("large", list(range(50, 66)), max_tokens=1))
    engine.add(ask("small", [1], max_tokens=1))
    engine.run()
    assert list(engine.ended) == ["running", "large", "small"]
