"""The block pool against a model made of plain dicts and lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool, OutOfBlocks
from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent


def chain(length: int, branch: int = 0) -> list[bytes]:
    """Hashes of a chain of blocks; branches share their first two blocks."""
    return block_hashes([0, 0, *([branch] * (length - 2))][:length], 1, b"root")


def replay(events: list[KvEvent], known: set[bytes]) -> set[bytes]:
    """What a reader of the events believes to be cached. Each event must be news."""
    known = set(known)
    for event in events:
        match event:
            case BlockStored(hashes):
                assert known.isdisjoint(hashes) and len(set(hashes)) == len(hashes)
                known.update(hashes)
            case BlockRemoved(hashes):
                assert known.issuperset(hashes) and len(set(hashes)) == len(hashes)
                known.difference_update(hashes)
            case CacheCleared():
                known.clear()
    return known


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_too_large_a_wish_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.publish(pool.allocate(2), chain(2))
    with pytest.raises(OutOfBlocks, match="2 KV blocks asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.match(chain(2)) == 2
    pool.check()


def test_releasing_too_often_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_a_prefix_outlives_its_tail() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, chain(4))
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[3], blocks[2]]
    assert pool.match(chain(4)) == 2
    assert pool.drain_events() == [BlockStored(chain(4)), BlockRemoved([chain(4)[3], chain(4)[2]])]


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = pool.allocate(2), pool.allocate(1)
    pool.publish(cached, chain(2))
    pool.release(cached)
    pool.release(plain)
    assert pool.allocate(1) == plain and pool.match(chain(2)) == 2


def test_what_another_worker_has_taken_goes_before_the_rest_and_after_what_is_empty() -> None:
    pool = BlockPool(5)
    old, moved, empty = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    pool.publish(old, [b"old", b"older"])
    pool.publish(moved, [b"head", b"tail"])
    pool.release(old)
    pool.release(moved)
    pool.release(empty)
    for _ in range(2):
        pool.release(pool.acquire([b"head", b"tail"]), copied=True)  # found as long as it is there
        pool.check()
    assert pool.num_free == 5 and pool.counts()["cached"] == 4
    assert pool.allocate(3) == [*empty, moved[1], moved[0]]
    assert pool.match([b"old", b"older"]) == 2
    pool.check()


def test_what_is_used_here_again_is_no_spare_copy() -> None:
    pool = BlockPool(2)
    taken, other = pool.allocate(2)
    pool.publish([taken, other], [b"taken", b"other"])
    user = pool.acquire([b"taken"])
    pool.release([other])
    pool.release([taken], copied=True)  # but somebody uses it
    pool.release(user)
    assert pool.allocate(1) == [other]
    pool.release(pool.acquire([b"taken"]), copied=True)
    pool.clear()
    assert pool.allocate(1) == [taken]
    pool.check()


def test_use_refreshes_a_cached_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish([first, second], [b"first", b"second"])
    pool.release([second, first])  # first is the older of the two
    pool.release(pool.acquire([b"first"]))
    assert pool.allocate(1) == [second]
    assert pool.match([b"first"]) == 1


def test_locked_prefixes_stay_under_pressure() -> None:
    """What was acquired is not evicted, whatever is asked for."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, chain(4))
    pool.release(blocks)
    locked = pool.acquire(chain(4)[:2])
    assert locked == blocks[:2] and pool.num_idle(chain(4)) == 2
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert set(pool.allocate(2)) == set(blocks[2:]) and pool.acquire(chain(4)) == locked


def test_the_last_free_block_can_be_acquired() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.publish(blocks, chain(1))
    pool.release(blocks)
    assert pool.acquire(chain(1)) == blocks and pool.num_free == 0
    pool.check()


def test_the_first_block_keeps_a_hash_that_comes_twice() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish([first], [b"same"])
    pool.publish([second], [b"same"])
    assert pool.acquire([b"same"]) == [first]
    assert pool.drain_events() == [BlockStored([b"same"])]
    pool.release([second])
    assert pool.match([b"same"]) == 1


def test_clear_forgets_but_leaves_holders_alone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.publish(blocks, chain(2))
    pool.clear()
    assert pool.match(chain(2)) == 0 and pool.num_free == 1 and pool.hashes() == []
    assert isinstance(pool.drain_events()[-1], CacheCleared)
    pool.publish(blocks, chain(2))  # still held and still right: may be found again
    assert pool.acquire(chain(2)) == blocks
    pool.check()


def test_counts_tell_every_block_once() -> None:
    pool = BlockPool(5)
    cached, active, transfer = pool.allocate(1), pool.allocate(1), pool.allocate(2)
    pool.publish(cached, [b"hash"])
    pool.release(cached)
    pool.mark_transfer(transfer)
    assert pool.counts() == {"free": 1, "cached": 1, "active": 1, "transfer": 2}
    pool.unmark_transfer(transfer[:1])
    pool.release(transfer[1:])
    assert pool.counts() == {"free": 2, "cached": 1, "active": 2, "transfer": 0}
    pool.release([*active, *transfer[:1]])
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random holders over few blocks and few, branching chains."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block -> hash it can be found by
        self.free = list(range(num_blocks))  # next to be handed out first
        self.generations = [0] * num_blocks
        self.known: set[bytes] = set()  # by a reader of the events
        self.transfer: set[int] = set()

    def references(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.holders)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == self.free[:count]
        del self.free[:count]
        for block in blocks:
            assert self.pool.generation(block) > self.generations[block]
            self.generations[block] = self.pool.generation(block)
            self.content.pop(block, None)
        self.holders.append(blocks)

    @rule(length=st.integers(1, 6), branch=st.integers(0, 2))
    def acquire(self, length: int, branch: int) -> None:
        hashes = chain(length, branch)
        expected = []
        for block_hash in hashes:
            found = [block for block, content in self.content.items() if content == block_hash]
            if not found:
                break
            expected += found
        assert self.pool.match(hashes) == len(expected)
        assert self.pool.num_idle(hashes[: len(expected)]) == sum(block in self.free for block in expected)
        assert self.pool.acquire(hashes) == expected
        self.free = [block for block in self.free if block not in expected]
        self.holders.append(expected)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), branch=st.integers(0, 2))
    def publish(self, data: st.DataObject, branch: int) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        hashes = chain(len(blocks), branch)
        self.pool.publish(blocks, hashes)
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block not in self.content and block_hash not in self.content.values():
                self.content[block] = block_hash

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.references(block) == 0:
                self.transfer.discard(block)
                self.free.insert(len(self.free) if block in self.content else 0, block)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), done=st.booleans())
    def mark(self, data: st.DataObject, done: bool) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        if done:
            self.pool.unmark_transfer(blocks)
            self.transfer -= set(blocks)
        else:
            self.pool.mark_transfer(blocks)
            self.transfer |= set(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.content.clear()

    @rule()
    def read_events(self) -> None:
        self.known = replay(self.pool.drain_events(), self.known)
        assert self.known == set(self.content.values())
        assert self.pool.drain_events() == []

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert sorted(self.pool.hashes()) == sorted(self.content.values())
        assert [self.pool.generation(block) for block in range(self.num_blocks)] == self.generations
        cached = sum(block in self.content for block in self.free)
        assert self.pool.counts() == {
            "free": len(self.free) - cached,
            "cached": cached,
            "active": self.num_blocks - len(self.free) - len(self.transfer),
            "transfer": len(self.transfer),
        }

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.read_events()
        for holder in self.holders:
            self.pool.release(holder)
        assert self.pool.num_free == self.num_blocks
        self.pool.check()


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_events_tell_where_blocks_come_in_their_prompt() -> None:
    """Those that were known already part the others."""
    pool, hashes = BlockPool(8), chain(5)
    pool.publish(pool.allocate(1), hashes[2:3], position=2, parent=hashes[1], root=b"r")
    pool.publish(pool.allocate(5), hashes, parent=b"r", root=b"r")
    assert pool.drain_events() == [
        BlockStored(hashes[2:3], 2, hashes[1], b"r"),
        BlockStored(hashes[:2], 0, b"r", b"r"),
        BlockStored(hashes[3:], 3, hashes[2], b"r"),
    ]
