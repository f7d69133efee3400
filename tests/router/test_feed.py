"""Numbered events over a lossy, reordering, duplicating way."""

from hypothesis import given
from hypothesis import strategies as st

from engine.request import BlockRemoved, BlockStored, KvEvent
from router.feed import Feed, Verdict
from router.index import BlockIndex


def test_nothing_is_applied_before_a_snapshot() -> None:
    feed = Feed()
    assert feed.judge(1) is Verdict.SNAPSHOT and feed.lags(0)
    feed.snapshot(3)
    assert [feed.judge(sequence) for sequence in (1, 3, 4, 4, 5)] == [
        Verdict.IGNORE,
        Verdict.IGNORE,
        Verdict.APPLY,
        Verdict.IGNORE,
        Verdict.APPLY,
    ]


def test_a_gap_is_recovered_once() -> None:
    """Batch 5 of 10 is lost: one replay, and the cursor is where the worker is."""
    feed = Feed()
    feed.snapshot(0)
    replays = 0
    for sequence in (1, 2, 3, 4, 6, 7, 8, 9, 10):
        if feed.judge(sequence) is Verdict.REPLAY:
            replays += 1
            assert feed.sequence == 4
            for again in (5, 6, 7, 8):  # the worker went on meanwhile
                assert feed.judge(again) is Verdict.APPLY
    assert replays == 1
    assert feed.sequence == 10


def test_the_last_batch_is_missed_when_the_worker_says_its_number() -> None:
    feed = Feed()
    feed.snapshot(3)
    assert not feed.lags(3) and not feed.lags(2) and feed.lags(4)


def test_a_snapshot_that_fails_is_asked_for_again() -> None:
    feed = Feed()
    feed.snapshot(1)
    assert feed.judge(3) is Verdict.REPLAY
    feed.forget()  # it has been thrown away there
    assert feed.judge(2) is Verdict.SNAPSHOT  # late, and of no use alone


@given(st.data())
def test_index_is_the_cache_after_any_losses(data: st.DataObject) -> None:
    """Whatever happens to messages: after the last one, or after a replay or snapshot, the index is the cache.

    Snapshots may be newer than the number that they carry, as a worker takes the number first.
    """
    hashes = [bytes([number]) * 16 for number in range(6)]
    states: list[set[bytes]] = [set()]
    batches: list[tuple[int, list[KvEvent]]] = []
    for sequence in range(1, data.draw(st.integers(1, 12)) + 1):
        stored = data.draw(st.lists(st.sampled_from(hashes), max_size=3))
        removed = data.draw(st.lists(st.sampled_from(hashes), max_size=3))
        batches.append((sequence, [BlockStored(stored), BlockRemoved(removed)]))
        states.append((states[-1] | set(stored)) - set(removed))
    last = len(batches)
    arriving = [*data.draw(st.lists(st.sampled_from(batches), max_size=20)), batches[-1]]
    feed, index = Feed(), BlockIndex()
    for sequence, events in arriving:
        match feed.judge(sequence):
            case Verdict.APPLY:
                index.apply(0, events)
            case Verdict.REPLAY if feed.sequence is not None and data.draw(st.booleans()):
                for again, events in batches[feed.sequence : data.draw(st.integers(sequence, last))]:
                    assert feed.judge(again) is Verdict.APPLY
                    index.apply(0, events)
            case Verdict.REPLAY | Verdict.SNAPSHOT:
                number = data.draw(st.integers(sequence, last))
                index.replace(0, sorted(states[data.draw(st.integers(number, last))]))
                feed.snapshot(number)
        index.sweep()
    assert feed.sequence == last
    assert {block_hash for block_hash in hashes if index.holders(block_hash)} == states[last]
