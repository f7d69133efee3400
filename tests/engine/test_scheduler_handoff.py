"""Sequences whose KV comes from a peer, or goes to one."""

import pytest
from fake_engine import BLOCK, FakeEngine, ask

from engine.scheduler import NothingToFetch
from engine.sequence import State


def test_handoff_gives_the_same_tokens() -> None:
    request = ask("r", list(range(10)))
    prefill, decode = FakeEngine(), FakeEngine()
    prefill.add(request, hold=True)
    prefill.run()
    held = prefill.scheduler.sequences["r"]
    assert held.state is State.HELD and len(held.block_ids) == 3 and not prefill.scheduler.has_work()
    assert prefill.scheduler.num_waiting == 0  # it costs no further work
    assert decode.scheduler.reserve(decode.sequence(request))
    assert decode.pool.counts()["transfer"] == 3 and not decode.scheduler.has_work()
    decode.commit("r")
    assert decode.pool.counts()["transfer"] == 0
    decode.run()
    decode.assert_exact(request)
    assert decode.computed == len(decode.outputs["r"]) - 1  # no prompt token
    prefill.scheduler.release("r")
    prefill.assert_idle()
    decode.assert_idle()
    # What landed is a cached prefix like any other.
    again = decode.add(ask("again", list(range(10))))
    decode.run()
    assert again.num_cached_tokens == 2 * BLOCK


def test_the_first_token_can_end_a_handoff() -> None:
    engine = FakeEngine()
    assert engine.scheduler.reserve(engine.sequence(ask("r", [1, 2], max_tokens=1)))
    engine.commit("r")
    assert engine.ended["r"].finish_reason == "length"
    assert engine.scheduler.commit("r", 1) is None
    engine.run()
    engine.assert_idle()


def test_a_reserved_prefix_is_shared_and_only_the_rest_is_in_transfer() -> None:
    engine = FakeEngine()
    engine.add(ask("first", list(range(9)), max_tokens=1))
    engine.run()
    sequence = engine.sequence(ask("r", [*range(8), 50, 51, 52]))
    assert engine.scheduler.reserve(sequence)
    assert sequence.num_cached_tokens == 8 and engine.pool.counts()["transfer"] == 1
    assert engine.scheduler.recompute("r") is sequence  # the transfer failed, its writer is fenced
    assert engine.pool.counts()["transfer"] == 0
    before = engine.computed
    engine.run()
    engine.assert_exact(sequence.request)
    assert engine.computed - before == 3 + len(engine.outputs["r"]) - 1 and sequence.num_cached_tokens == 8
    engine.assert_idle()


def test_detaching_gives_the_shared_prefix_back() -> None:
    engine = FakeEngine()
    engine.add(ask("first", list(range(9)), max_tokens=1))
    engine.run()
    assert engine.scheduler.reserve(engine.sequence(ask("r", [*range(8), 50])))
    blocks = engine.scheduler.detach("r", then_wait=False)
    assert len(blocks) == 1 and engine.pool.num_free == engine.num_blocks - 1
    assert engine.scheduler.detach("r", then_wait=True) == []
    engine.pool.release(blocks)
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("then_wait", [True, False])
def test_detached_blocks_stay_away_until_released(then_wait: bool) -> None:
    engine = FakeEngine()
    sequence = engine.sequence(ask("r", list(range(9))))
    assert engine.scheduler.reserve(sequence)
    blocks = engine.scheduler.detach("r", then_wait=then_wait)
    assert len(blocks) == 3
    engine.run()
    if then_wait:
        engine.assert_exact(sequence.request)
    else:
        assert sequence.finish_reason == "abort"
    assert engine.pool.counts()["transfer"] == 3 and engine.pool.num_free == engine.num_blocks - 3
    engine.pool.release(blocks)
    engine.assert_idle()


def test_a_sequence_waits_for_detached_blocks_instead_of_ending_early() -> None:
    engine = FakeEngine(num_blocks=6)
    assert engine.scheduler.reserve(engine.sequence(ask("gone", list(range(60, 72)))))
    blocks = engine.scheduler.detach("gone", then_wait=False)
    request = ask("r", list(range(8)), max_tokens=12)
    engine.add(request)
    engine.run()  # to the point where nothing can go on: the rest of the pool is in the peer's hands
    assert "r" not in engine.ended and not engine.scheduler.has_work()
    engine.pool.release(blocks)
    assert engine.scheduler.has_work()
    engine.run()
    engine.assert_exact(request)
    engine.assert_idle()


def test_no_work_while_all_blocks_are_held_by_peers() -> None:
    engine = FakeEngine(num_blocks=3)
    engine.add(ask("held", list(range(12))), hold=True)
    engine.run()
    waiting = ask("waiting", [1, 2, 3], deadline=9.0)
    engine.add(waiting)
    engine.run()
    assert not engine.ended and engine.scheduler.num_waiting == 1
    assert not engine.scheduler.has_work(now=8.0) and engine.scheduler.has_work(now=10.0)  # its deadline is work
    engine.scheduler.release("held")
    engine.run()
    engine.assert_exact(waiting)
    engine.assert_idle()


def test_a_newcomer_that_fits_is_work_although_another_waits_for_peers() -> None:
    engine = FakeEngine(num_blocks=4)
    engine.add(ask("held", list(range(12))), hold=True)
    engine.run()
    engine.add(ask("large", list(range(50, 58)), max_tokens=1))
    engine.run()
    small = ask("small", [1, 2], max_tokens=2, priority=-1)
    engine.add(small)
    engine.run()
    assert list(engine.ended) == ["small"]
    engine.assert_exact(small)


def test_a_commit_is_work_although_others_wait_for_peers() -> None:
    engine = FakeEngine(num_blocks=4)
    request = ask("landing", list(range(9)), max_tokens=3)
    assert engine.scheduler.reserve(engine.sequence(request))
    engine.add(ask("large", list(range(50, 60)), max_tokens=1))
    engine.run()
    assert not engine.ended and not engine.scheduler.has_work()
    engine.commit("landing")
    engine.run()
    assert list(engine.ended) == ["landing", "large"]
    engine.assert_exact(request)
    engine.assert_idle()


def test_reservations_leave_room_for_running_and_earlier_ones() -> None:
    engine = FakeEngine(num_blocks=6, max_batched_tokens=64)
    engine.add(ask("a", list(range(8)), max_tokens=20))
    engine.step()
    assert not engine.scheduler.reserve(engine.sequence(ask("too much", list(range(40, 56)))))
    engine.add(ask("earlier", list(range(20, 36)), max_tokens=2))
    assert not engine.scheduler.reserve(engine.sequence(ask("later", [1])))
    assert engine.scheduler.reserve(engine.sequence(ask("urgent", [1], priority=-1)))


def test_reserved_sequences_count_as_running_to_be() -> None:
    engine = FakeEngine(num_blocks=64, max_running=2)
    assert engine.scheduler.reserve(engine.sequence(ask("a", [1])))
    engine.add(ask("b", [2]))
    engine.add(ask("c", [3]))
    engine.step()
    assert engine.scheduler.num_running == 1
    assert not engine.scheduler.reserve(engine.sequence(ask("d", [4])))
    engine.commit("a")
    assert engine.scheduler.num_running == 2
    engine.run()
    engine.assert_idle()


def test_a_full_pool_takes_the_reservation_later() -> None:
    """B151: no room at the time of arrival; nothing is kept of the attempt, and nobody's blocks are taken."""
    engine = FakeEngine(num_blocks=6, max_batched_tokens=64)
    first = ask("first", list(range(16)), max_tokens=6)
    assert engine.scheduler.reserve(engine.sequence(first))
    second = ask("second", list(range(30, 42)), max_tokens=2)
    engine.commit("first")
    waited = 0
    while not engine.scheduler.reserve(engine.sequence(second)):
        assert "second" not in engine.scheduler.sequences
        assert engine.step().entries
        waited += 1
    assert waited > 1
    engine.commit("second")
    engine.run()
    for request in (first, second):
        engine.assert_exact(request)
    assert engine.computed == len(engine.outputs["first"]) + len(engine.outputs["second"]) - 2  # no prompt token
    engine.assert_idle()


def test_preempted_handoffs_are_computed_in_small_chunks_and_all_end() -> None:
    """B133: a tiny pool, so that sequences whose KV came from a peer give their blocks back in the middle."""
    engine = FakeEngine(num_blocks=9, max_batched_tokens=64, max_mixed_prefill_tokens=2)
    requests = [ask(f"r{i}", [10 * i + k for k in range(7)], max_tokens=16) for i in range(3)]
    for request in requests:
        assert engine.scheduler.reserve(engine.sequence(request))
        engine.commit(request.request_id)
    engine.run()
    assert engine.computed > sum(len(engine.outputs[r.request_id]) - 1 for r in requests)  # some was lost
    for request in requests:
        engine.assert_exact(request)
    engine.assert_idle()


def test_a_prefix_that_a_peer_had_is_not_computed() -> None:
    request = ask("r", list(range(20)))
    peer, engine = FakeEngine(), FakeEngine()
    peer.add(ask("before", list(range(14)), max_tokens=1))
    peer.run()
    assert peer.scheduler.hold_cached(peer.sequence(ask("fetch", list(range(16))))) == 12
    held = peer.scheduler.sequences["fetch"]
    assert held.state is State.HELD and len(held.block_ids) == 3 and not peer.scheduler.has_work()
    assert engine.scheduler.reserve(engine.sequence(request), 16)
    assert engine.pool.counts()["transfer"] == 4 and not engine.scheduler.has_work()
    engine.commit_prefix("r", 3)
    assert engine.pool.counts()["transfer"] == 0
    sequence = engine.scheduler.sequences["r"]
    assert (sequence.num_cached_tokens, sequence.num_fetched_tokens) == (12, 12)
    engine.run()
    engine.assert_exact(request)
    assert engine.computed == 8 + len(engine.outputs["r"]) - 1
    peer.scheduler.release("fetch")
    peer.assert_idle()
    engine.assert_idle()
    assert engine.scheduler.commit_prefix("r", 3) is None


def test_held_cached_blocks_are_not_handed_out() -> None:
    engine = FakeEngine(num_blocks=4)
    engine.add(ask("before", list(range(9)), max_tokens=1))
    engine.run()
    assert engine.scheduler.hold_cached(engine.sequence(ask("fetch", list(range(8))))) == 8
    assert engine.scheduler.hold_cached(engine.sequence(ask("other", list(range(50, 58))))) == 0
    waiting = ask("waiting", list(range(30, 40)), max_tokens=2)
    engine.add(waiting)
    engine.run()
    assert not engine.ended.keys() & {"waiting"} and engine.pool.num_free == 2
    engine.scheduler.release("fetch")
    engine.run()
    engine.assert_exact(waiting)
    engine.assert_idle()


def test_of_a_prefix_only_what_is_missing_and_may_be_shared_is_reserved() -> None:
    engine = FakeEngine()
    engine.add(ask("before", list(range(9)), max_tokens=1))
    engine.run()
    for nothing_left, tokens in (
        (ask("all here", list(range(9))), 9),
        (ask("last", [*range(8), 50, 51, 52, 53]), 12),
        (ask("scored", list(range(60, 80)), prompt_logprobs=0), 16),
    ):
        with pytest.raises(NothingToFetch):
            engine.scheduler.reserve(engine.sequence(nothing_left), tokens)
        assert nothing_left.request_id not in engine.scheduler.sequences
    sequence = engine.sequence(ask("r", [*range(8), *range(50, 59)]), hold=True)
    assert engine.scheduler.reserve(sequence, 14)
    assert len(sequence.block_ids) == 3 and sequence.num_published == 2
    engine.commit_prefix("r", 3)
    engine.run()
    assert sequence.state is State.HELD and engine.outputs["r"]
    engine.scheduler.release("r")
    engine.assert_idle()
