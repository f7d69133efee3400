"""The block index against a plain dictionary, and the feed that keeps it true."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import BlockRemoved, BlockStored, CacheCleared
from router.feed import Feed, Verdict
from router.index import BlockIndex

HASHES = [bytes([number]) * 16 for number in range(12)]
workers = st.sampled_from(["a", "b", "c"])
hashes = st.lists(st.sampled_from(HASHES), max_size=5)
operations = st.one_of(
    st.tuples(st.just("stored"), workers, hashes),
    st.tuples(st.just("removed"), workers, hashes),
    st.tuples(st.just("cleared"), workers, st.just([])),
    st.tuples(st.just("left"), workers, st.just([])),
    st.tuples(st.just("snapshot"), workers, hashes),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=40), hashes)
def test_index_equals_model(ops: list[tuple[str, str, list[bytes]]], chain: list[bytes]) -> None:
    index = BlockIndex()
    model: dict[str, set[bytes]] = {"a": set(), "b": set(), "c": set()}
    for kind, worker, found in ops:
        if kind == "stored":
            index.apply(worker, [BlockStored(found)])
            model[worker] |= set(found)
        elif kind == "removed":
            index.apply(worker, [BlockRemoved(found)])
            model[worker] -= set(found)
        elif kind == "cleared":
            index.apply(worker, [CacheCleared()])
            model[worker].clear()
        elif kind == "left":
            index.remove(worker)
            model[worker].clear()
        else:
            index.replace(worker, found)
            model[worker] = set(found)
    expected = {}
    for worker, held in model.items():
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        expected[worker] = depth
        assert index.num_blocks(worker) == len(held)
    assert index.prefixes(chain, model) == expected
    assert len(index) == len(set().union(*model.values()))  # nothing is left of what nobody holds


def test_feed_finds_gaps_and_repeats() -> None:
    feed = Feed()
    assert feed.judge(1) is Verdict.RESYNC  # before the first snapshot
    feed.snapshot(3)
    assert [feed.judge(number) for number in (2, 3, 4, 4, 5)] == [
        Verdict.IGNORE,
        Verdict.IGNORE,
        Verdict.APPLY,
        Verdict.IGNORE,
        Verdict.APPLY,
    ]
    assert feed.judge(7) is Verdict.RESYNC  # 6 is missing
    feed.snapshot(7)
    assert feed.judge(8) is Verdict.APPLY  # one recovery, not one for ever
