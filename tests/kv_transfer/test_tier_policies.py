"""Policies of tiers: what all must do, against a plain set, and what each is for."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_blocks import key

from kv_transfer.tiers.policies import POLICIES, policy_of
from kv_transfer.tiers.policies.arc import ARC
from kv_transfer.tiers.policies.base import Arrival, Policy
from kv_transfer.tiers.policies.cost_aware import CostAware
from kv_transfer.tiers.policies.lfu import LFU
from kv_transfer.tiers.policies.lru import LRU
from kv_transfer.tiers.policies.quotas import Quotas
from kv_transfer.tiers.policies.ranking import Ranking
from kv_transfer.tiers.policies.second_hit import SecondHit

CAPACITY = 6
SHARES = {"lru": 0.5, "arc": 0.3, "second_hit_lru": 0.5}
ALL = POLICIES | {f"quotas_{name}": policy_of(name, share) for name, share in SHARES.items()}


class PolicyAgainstSet(RuleBasedStateMachine):
    """Two chains of ten blocks each, of two owners."""

    @initialize(name=st.sampled_from(sorted(ALL)))
    def begin(self, name: str) -> None:
        self.policy = ALL[name](CAPACITY)
        self.there: set[bytes] = set()

    def arrival(self, number: int) -> Arrival:
        position = number % 10
        return Arrival(key(number), position, key(number - 1) if position else b"", key(-1 - number // 10))

    @rule(number=st.integers(0, 19), held=st.sets(st.integers(0, 19)))
    def offer(self, number: int, held: set[int]) -> None:
        arrival, kept = self.arrival(number), {key(each) for each in held}
        if arrival.key in self.there:
            self.policy.touch(arrival.key)
            return
        if not self.policy.admits(arrival):
            return
        if len(self.there) == CAPACITY:
            victim = self.policy.evict(arrival, kept.__contains__)
            if victim is None:
                assert self.there & kept or isinstance(self.policy, CostAware)
                return
            assert victim in self.there - kept
            self.there.remove(victim)
        self.policy.insert(arrival)
        self.there.add(arrival.key)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.policy.touch(data.draw(st.sampled_from(sorted(self.there))))

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.there)))
        self.policy.remove(gone)
        self.there.remove(gone)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.there)

    def teardown(self) -> None:
        """All can be got rid of."""
        if hasattr(self, "policy"):
            for _ in range(len(self.there)):
                victim = self.policy.evict(Arrival(key(77)), lambda each: False)
                assert victim is not None
                self.there.remove(victim)
            assert self.policy.evict(Arrival(key(77)), lambda each: False) is None


PolicyAgainstSet.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPolicyAgainstSet = PolicyAgainstSet.TestCase


def fill(policy: Policy, *numbers: int) -> None:
    for number in numbers:
        policy.insert(Arrival(key(number)))


def next_victim(policy: Policy, number: int = 1000) -> bytes | None:
    return policy.evict(Arrival(key(number)), lambda each: False)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"cost"}))
def test_what_was_never_used_again_goes_first(name: str) -> None:
    policy = POLICIES[name](4)
    fill(policy, 1, 2, 3, 4)
    policy.touch(key(1))
    policy.touch(key(2))
    assert {next_victim(policy), next_victim(policy)} == {key(3), key(4)}


def test_lfu_prefers_many_uses_until_they_are_long_ago() -> None:
    policy = LFU(4)
    fill(policy, 1, 2)
    for _ in range(3):
        policy.touch(key(1))
    policy.touch(key(2))
    assert next_victim(policy) == key(2)
    fill(policy, 3)
    for _ in range(100):
        policy.touch(key(3))
    fill(policy, 4)
    assert next_victim(policy) == key(1)


def test_lfu_remembers_the_uses_of_what_went() -> None:
    policy = LFU(8)
    fill(policy, 1, 2)
    for _ in range(4):
        policy.touch(key(1))
    fill(policy, 3, 3)
    assert policy.evict(Arrival(key(9)), lambda each: each != key(1)) == key(1)
    fill(policy, 1)
    assert next_victim(policy) == key(2)


def test_a_ranking_does_not_look_at_all_held_keys_each_time() -> None:
    ranking, looks = Ranking(), 0
    for number in range(400):
        ranking.set(key(number), number)

    def held(block_hash: bytes) -> bool:
        nonlocal looks
        looks += 1
        return block_hash in pinned

    pinned = {key(number) for number in range(200)}
    assert ranking.pop(held) == (key(200), 200.0)
    looks = 0
    assert [ranking.pop(held) for _ in range(10)] == [(key(number), number) for number in range(201, 211)]
    assert looks < 200
    pinned.remove(key(0))  # comes back before long
    assert (key(0), 0.0) in [ranking.pop(held) for _ in range(100)]
    pinned = {key(number) for number in range(100)}
    rest = [found[0] for found in iter(lambda: ranking.pop(held), None)]
    assert len(rest) == len(set(rest)) == 400 - 111 - 99 and ranking.pop(lambda each: True) is None
    pinned.clear()
    assert ranking.pop(held) is not None and len(ranking) == 98


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    policy = ARC(8)
    fill(policy, *range(8))
    for number in range(4):
        policy.touch(key(number))
    for number in range(100, 200):
        arrival = Arrival(key(number))
        assert policy.admits(arrival)
        assert policy.evict(arrival, lambda each: False) not in {key(each) for each in range(4)}
        policy.insert(arrival)


def test_arc_gives_room_to_what_it_missed() -> None:
    policy = ARC(4)
    fill(policy, 0, 1, 2, 3)
    policy.touch(key(0))
    assert next_victim(policy) == key(1)
    again = Arrival(key(1))
    policy.admits(again)
    policy.insert(again)
    assert policy._share == 1 and key(1) in policy._again


def test_cost_aware_takes_tails_before_heads_and_the_shorter_prompt_first() -> None:
    policy = CostAware(20)
    for prompt, length in ((100, 3), (200, 4)):
        for at in range(length):
            policy.insert(Arrival(key(prompt + at), 4096 * at, key(prompt + at - 1) if at else b""))
    gone = [next_victim(policy) for _ in range(7)]
    assert gone[0] == key(102)
    for prompt, length in ((100, 3), (200, 4)):
        assert [each for each in gone if each in {key(prompt + at) for at in range(length)}] == [
            key(prompt + at) for at in reversed(range(length))
        ]


def test_cost_aware_never_takes_the_block_before_the_one_that_comes() -> None:
    policy = CostAware(1)
    policy.insert(Arrival(key(1)))
    assert policy.evict(Arrival(key(2), 1, key(1)), lambda each: False) is None
    assert policy.evict(Arrival(key(3)), lambda each: False) == key(1)


def test_second_hit_lets_in_the_second_time() -> None:
    policy = SecondHit(LRU(4), 4)
    assert not policy.admits(Arrival(key(1))) and policy.admits(Arrival(key(1)))
    for number in range(2, 10):
        assert not policy.admits(Arrival(key(number)))
    assert not policy.admits(Arrival(key(1)))  # forgotten meanwhile


def test_an_owner_beyond_its_share_gives_room_to_itself() -> None:
    policy = Quotas(LRU, 10, 0.5)
    for number in range(5):
        policy.insert(Arrival(key(number), owner=key(-1)))
    for number in range(5, 10):
        policy.insert(Arrival(key(number), owner=key(-2) if number < 8 else b""))
    assert policy.evict(Arrival(key(20), owner=key(-1)), lambda each: False) == key(0)
    policy.insert(Arrival(key(20), owner=key(-1)))
    # Who has as much as others takes it from itself, and others from who has the most.
    tie = Quotas(LRU, 4, 0.9)
    for number in range(4):
        tie.insert(Arrival(key(number), owner=key(-1 - number % 2)))
    assert tie.evict(Arrival(key(9), owner=key(-2)), lambda each: False) == key(1)
    assert policy.evict(Arrival(key(21), owner=key(-2)), lambda each: False) == key(1)
    assert policy.evict(Arrival(key(22)), lambda each: each in {key(2), key(3), key(4), key(20)}) == key(5)


def test_nothing_stays_of_owners_that_have_no_block() -> None:
    quotas = Quotas(LRU, 4, 0.5)
    policy = SecondHit(quotas, 4)
    for number in range(100):
        assert not policy.admits(Arrival(key(number), owner=key(-number)))
        assert policy.evict(Arrival(key(number), owner=key(-number)), lambda each: False) is None
    assert not quotas._policies and not quotas._owners_with
    for number in range(100):
        arrival = Arrival(key(number), owner=key(-number))
        assert number < 4 or quotas.evict(arrival, lambda each: False) == key(number - 4)
        quotas.insert(arrival)
    assert len(quotas._policies) == 4
    for number in range(96, 100):
        quotas.remove(key(number))
    assert not quotas._policies and not quotas._owners_with


def test_a_quota_is_behind_the_door_not_before_it() -> None:
    policy = policy_of("second_hit_lru", 0.5)(4)
    assert not policy.admits(Arrival(key(1), owner=key(-1)))
    assert policy.admits(Arrival(key(1), owner=key(-1)))
