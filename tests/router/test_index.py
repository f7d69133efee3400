"""The block index and what is expected, against plain sets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from router.expected import ExpectedBlocks
from router.index import BlockIndex

WORKERS = ["a", "b", "c"]
CHAIN = block_hashes(range(40), 4, b"root")
HASHES = st.lists(st.sampled_from(CHAIN), max_size=6)


def longest(held: set[bytes]) -> int:
    """Leading blocks of CHAIN in `held`."""
    return next((depth for depth, block_hash in enumerate(CHAIN) if block_hash not in held), len(CHAIN))


class IndexIsTheModel(RuleBasedStateMachine):
    """Whatever workers tell, in any order, also of blocks that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.model: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}

    @rule(worker=st.sampled_from(WORKERS), stored=HASHES, removed=HASHES, cleared=st.booleans())
    def events(self, worker: str, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        events: list[KvEvent] = [BlockStored(stored), BlockRemoved(removed)]
        if cleared:
            events.insert(1, CacheCleared())
            stored = []
            self.model[worker].clear()
        self.index.apply(worker, events)
        self.model[worker] |= set(stored)
        self.model[worker] -= set(removed)

    @rule(worker=st.sampled_from(WORKERS), hashes=HASHES)
    def snapshot(self, worker: str, hashes: list[bytes]) -> None:
        self.index.replace(worker, hashes)
        self.model[worker] = set(hashes)

    @rule(worker=st.sampled_from(WORKERS))
    def gone(self, worker: str) -> None:
        self.index.remove(worker)
        self.model[worker] = set()

    @invariant()
    def same_as_the_model(self) -> None:
        assert self.index.prefixes(CHAIN, WORKERS) == {worker: longest(held) for worker, held in self.model.items()}
        assert {worker: self.index.num_blocks(worker) for worker in WORKERS} == {
            worker: len(held) for worker, held in self.model.items()
        }
        for block_hash in CHAIN:
            assert self.index.holders(block_hash) == {w for w, held in self.model.items() if block_hash in held}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert len(self.index) == len(set().union(*self.model.values()))


TestIndexIsTheModel = IndexIsTheModel.TestCase
TestIndexIsTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_only_the_workers_asked_for() -> None:
    index = BlockIndex()
    index.apply("a", [BlockStored(CHAIN)])
    index.apply("b", [BlockStored(CHAIN[:3])])
    assert index.prefixes(CHAIN, ["b", "new"]) == {"b": 3, "new": 0}
    assert index.prefixes([], ["a"]) == {"a": 0}
    assert index.prefixes(CHAIN, []) == {}


def test_a_hole_ends_the_prefix() -> None:
    index = BlockIndex()
    index.apply("a", [BlockStored(CHAIN), BlockRemoved([CHAIN[2]])])
    assert index.prefixes(CHAIN, ["a"]) == {"a": 2}


def test_a_cleared_cache_attracts_nothing() -> None:
    index = BlockIndex()
    index.apply("a", [BlockStored(CHAIN), CacheCleared()])
    assert index.prefixes(CHAIN, ["a"]) == {"a": 0}
    assert len(index) == 0


class ExpectationsAreTheModel(RuleBasedStateMachine):
    """Expectations end by time, by worker and by number."""

    MAX_BLOCKS = 20
    LIFETIME = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedBlocks(self.LIFETIME, self.MAX_BLOCKS)
        self.now = 0.0
        self.model: list[tuple[float, str, list[bytes]]] = []

    @rule(worker=st.sampled_from(WORKERS), depth=st.integers(0, len(CHAIN)))
    def expect(self, worker: str, depth: int) -> None:
        self.expected.expect(worker, CHAIN[:depth], self.now)
        self.model.append((self.now + self.LIFETIME, worker, CHAIN[:depth]))
        self.trim()

    @rule(seconds=st.floats(0.0, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.expected.expire(self.now)
        self.trim()

    @rule(worker=st.sampled_from(WORKERS))
    def gone(self, worker: str) -> None:
        self.expected.remove(worker)
        self.model = [entry for entry in self.model if entry[1] != worker]

    def trim(self) -> None:
        self.model = [entry for entry in self.model if entry[0] > self.now]
        while sum(len(hashes) for _, _, hashes in self.model) > self.MAX_BLOCKS:
            self.model.pop(0)

    @invariant()
    def same_as_the_model(self) -> None:
        for block_hash in CHAIN:
            assert set(self.expected.holders(block_hash)) == {w for _, w, hashes in self.model if block_hash in hashes}
        assert len(self.expected) == max((len(hashes) for _, _, hashes in self.model), default=0)


TestExpectationsAreTheModel = ExpectationsAreTheModel.TestCase
TestExpectationsAreTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(told=st.integers(0, 10), expected=st.integers(0, 10))
def test_what_is_told_and_what_is_expected_add_up(told: int, expected: int) -> None:
    """A chain may begin with blocks that are there and go on with blocks that are coming."""
    index, soon = BlockIndex(), ExpectedBlocks()
    index.apply("a", [BlockStored(CHAIN[:told])])
    soon.expect("a", CHAIN[:expected], 0.0)
    assert index.prefixes(CHAIN, ["a"]) == {"a": told}
    assert index.prefixes_soon(CHAIN, ["a", "b"], soon) == {"a": max(told, expected), "b": 0}


def test_expected_behind_told() -> None:
    index, soon = BlockIndex(), ExpectedBlocks()
    index.apply("a", [BlockStored(CHAIN[:2])])
    soon.expect("a", CHAIN, 0.0)
    index.apply("b", [BlockStored(CHAIN)])
    assert index.prefixes_soon(CHAIN, ["a", "b"], soon) == {"a": 10, "b": 10}
    soon.expire(5.0)
    assert index.prefixes_soon(CHAIN, ["a", "b"], soon) == {"a": 2, "b": 10}


def test_one_expectation_larger_than_all_is_cut() -> None:
    soon = ExpectedBlocks(max_blocks=4)
    soon.expect("a", CHAIN, 0.0)
    assert [bool(soon.holders(block_hash)) for block_hash in CHAIN[:6]] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("requests", [300])
def test_the_index_does_not_grow_with_the_number_of_prefixes(requests: int) -> None:
    """A worker evicts as much as it stores; so does the index."""
    index = BlockIndex()
    held: list[list[bytes]] = []
    for number in range(requests):
        hashes = block_hashes(range(number, number + 80), 4, number.to_bytes(4, "big"))
        events: list[KvEvent] = [BlockStored(hashes)]
        held.append(hashes)
        if len(held) > 5:
            events.append(BlockRemoved(held.pop(0)))
        index.apply("a", events)
        assert len(index) == index.num_blocks("a") == 20 * len(held)
