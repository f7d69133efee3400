"""The block index and what is expected, against plain sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent
from router.expected import ExpectedBlocks
from router.index import BlockIndex

WORKERS = [0, 1, 70]  # rows of the table
ROWS = 80
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
        self.model: dict[int, set[bytes]] = {worker: set() for worker in WORKERS}

    @rule(worker=st.sampled_from(WORKERS), stored=HASHES, removed=HASHES, cleared=st.booleans())
    def events(self, worker: int, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        events: list[KvEvent] = [BlockStored(stored), BlockRemoved(removed)]
        if cleared:
            events.insert(1, CacheCleared())
            stored = []
            self.model[worker].clear()
        self.index.apply(worker, events)
        self.model[worker] |= set(stored)
        self.model[worker] -= set(removed)

    @rule(worker=st.sampled_from(WORKERS), hashes=HASHES)
    def snapshot(self, worker: int, hashes: list[bytes]) -> None:
        self.index.replace(worker, hashes)
        self.model[worker] = set(hashes)

    @rule(worker=st.sampled_from(WORKERS))
    def gone(self, worker: int) -> None:
        self.index.remove(worker)
        self.model[worker] = set()

    @rule(worker=st.sampled_from(WORKERS), hashes=HASHES)
    def snapshot_that_is_given_up(self, worker: int, hashes: list[bytes]) -> None:
        steps = self.index.replacing(worker, hashes)
        next(steps, None)
        if hashes:
            steps.close()
        else:
            self.model[worker] = set()

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @invariant()
    def same_as_the_model(self) -> None:
        depths = self.index.depths(CHAIN, ROWS)
        assert {worker: depths[worker] for worker in WORKERS} == {w: longest(held) for w, held in self.model.items()}
        assert depths.sum() == depths[WORKERS].sum()
        assert {worker: self.index.num_blocks(worker) for worker in WORKERS} == {
            worker: len(held) for worker, held in self.model.items()
        }
        for block_hash in CHAIN:
            assert self.index.holders(block_hash) == {w for w, held in self.model.items() if block_hash in held}

    @rule()
    def nothing_is_left_behind(self) -> None:
        while self.index.sweep():
            pass
        assert len(self.index) == len(set().union(*self.model.values()))


TestIndexIsTheModel = IndexIsTheModel.TestCase
TestIndexIsTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_depths_of_workers_without_anything_and_of_no_prompt() -> None:
    index = BlockIndex()
    index.apply(0, [BlockStored(CHAIN)])
    index.apply(1, [BlockStored(CHAIN[:3])])
    assert index.depths(CHAIN, 3).tolist() == [10, 3, 0]
    assert index.depths(CHAIN[:1], 3).tolist() == [1, 1, 0]
    assert index.depths([], 3).tolist() == [0, 0, 0]
    assert BlockIndex().depths(CHAIN, 2).tolist() == [0, 0]


def test_a_hole_ends_the_prefix() -> None:
    index = BlockIndex()
    index.apply(0, [BlockStored(CHAIN), BlockRemoved([CHAIN[2]])])
    assert index.depths(CHAIN, 1).tolist() == [2]


def test_a_cleared_cache_attracts_nothing() -> None:
    index = BlockIndex()
    index.apply(0, [BlockStored(CHAIN), CacheCleared()])
    assert index.depths(CHAIN, 1).tolist() == [0]
    assert not index.sweep()
    assert len(index) == 0


def test_a_worker_s_blocks_are_gone_at_once_and_taken_away_in_parts() -> None:
    """Also for whoever is next in its row."""
    index = BlockIndex()
    many = [number.to_bytes(16, "little") for number in range(10_000)]
    index.apply(0, [BlockStored(many)])
    index.apply(1, [BlockStored(many[:100])])
    index.remove(0)
    assert index.depths(many, 2).tolist() == [0, 100] and index.num_blocks(0) == 0
    index.apply(0, [BlockStored(many[:3])])
    assert index.depths(many, 2).tolist() == [3, 100] and index.holders(many[2]) == {0, 1}
    left = [len(index)]
    while index.sweep():
        left.append(len(index))
    assert left == sorted(left, reverse=True) and len(left) == 3
    assert index.depths(many, 2).tolist() == [3, 100] and len(index) == 100


def test_bits_of_those_that_left_are_used_again() -> None:
    index = BlockIndex()
    for number in range(1000):
        index.apply(number % 3, [BlockStored(CHAIN)])
        index.remove(number % 3)
        index.sweep()
    assert len(index) == 0 and len(index._hashes_of) == 0 and index._bits.size < 8


def test_many_workers_fall_behind_at_once_and_one_by_one() -> None:
    index = BlockIndex()
    lengths = [number % 11 for number in range(100)] + [7] * 60
    for row, length in enumerate(lengths):
        index.apply(row, [BlockStored(CHAIN[:length])])
    assert index.depths(CHAIN, len(lengths)).tolist() == lengths


class ExpectationsAreTheModel(RuleBasedStateMachine):
    """Each lasts as long as it must, none twice as long, none of a worker that is gone."""

    LIFETIME = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedBlocks(self.LIFETIME)
        self.now = 0.0
        self.model: list[tuple[float, int, int]] = []  # when, worker, blocks

    @rule(workers=st.lists(st.sampled_from(WORKERS), min_size=1, unique=True), depth=st.integers(0, len(CHAIN)))
    def expect(self, workers: list[int], depth: int) -> None:
        self.expected.expect(workers, CHAIN[:depth], self.now)
        self.model += [(self.now, worker, depth) for worker in workers]

    @rule(seconds=st.floats(0.0, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.expected.expire(self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def gone(self, worker: int) -> None:
        self.expected.remove(worker)
        self.model = [entry for entry in self.model if entry[1] != worker]

    def depth(self, worker: int, seconds: float) -> int:
        """Of expectations so young."""
        young = [blocks for at, who, blocks in self.model if who == worker and self.now - at < seconds]
        return max(young, default=0)

    @invariant()
    def between_the_bounds(self) -> None:
        depths = self.expected.depths(CHAIN, ROWS)
        for worker in WORKERS:
            assert self.depth(worker, self.LIFETIME) <= depths[worker] <= self.depth(worker, 2 * self.LIFETIME)
        assert len(self.expected) >= depths.max()  # blocks of workers that are gone end with the others


TestExpectationsAreTheModel = ExpectationsAreTheModel.TestCase
TestExpectationsAreTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_expectations_never_exceed_their_number() -> None:
    soon = ExpectedBlocks(max_blocks=40)
    for number in range(30):
        chain = block_hashes(range(4 * (number % 25)), 4, number.to_bytes(4, "big"))
        soon.expect([0], chain, 0.0)
        assert len(soon) <= 40
        assert soon.depths(chain, 1)[0] == min(len(chain), 20)  # the latest is there, as far as there is room


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
        index.apply(0, events)
        assert len(index) == index.num_blocks(0) == 20 * len(held)


def test_expectations_of_workers_that_come_and_go_take_no_room_for_ever() -> None:
    expected = ExpectedBlocks(5.0)
    for second in range(200):
        expected.expect([second % 3], CHAIN, float(second))
        expected.remove(second % 3)
        assert expected.depths(CHAIN, 3).tolist() == [0, 0, 0]
    assert expected._bits.size < 20
    expected.expire(300.0)
    assert len(expected) == 0
