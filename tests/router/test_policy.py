"""Decisions on tables, and what holds for all of them."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import POLICIES, ROUND_ROBIN, Ask, Candidate, Decision, NoWorker, Way, place
from router.reservations import Outstanding

ASK = Ask(prompt_tokens=1000, max_tokens=100)
ALL_POLICIES = [*POLICIES, ROUND_ROBIN]


def worker(
    name: str,
    role: str = "decode",
    *,
    prefill: int = 0,
    decode: int = 0,
    cached: int = 0,
    soon: int = 0,
    size: int = 16,
) -> Candidate:
    return Candidate(name, role, Outstanding(0, prefill, decode), size, cached, max(cached, soon))


def decide(*candidates: Candidate, ask: Ask = ASK, policy: str = "prefix", local: int = 32, turn: int = 0) -> Decision:
    return place(ask, candidates, policy=policy, local_prefill_tokens=local, turn=turn, rng=random.Random(1))


def names(decision: Decision) -> tuple[str, str | None]:
    return decision.decode.worker, decision.prefill.worker if decision.prefill else None


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("candidates", [[], [worker("p", "prefill")]])
def test_nobody_to_decode(policy: str, candidates: list[Candidate]) -> None:
    with pytest.raises(NoWorker):
        decide(*candidates, policy=policy)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_ways(policy: str) -> None:
    decode, prefill, both = worker("d"), worker("p", "prefill"), worker("a", "aggregated")
    table: list[tuple[Way, list[Candidate], Ask]] = [
        (Way.REMOTE, [decode, prefill], ASK),
        (Way.ALONE, [decode], ASK),
        (Way.ASKED, [decode, prefill], replace(ASK, local_prefill_only=True)),
        (Way.SHORT, [decode, prefill], replace(ASK, prompt_tokens=32)),
        (Way.REMOTE, [decode, prefill], replace(ASK, prompt_tokens=33)),
        (Way.SHORT, [worker("d", cached=61), prefill], ASK),  # 24 tokens are missing
        (Way.REMOTE, [worker("d", cached=60), prefill], ASK),  # 40
        (Way.REMOTE, [worker("d", soon=61), prefill], ASK),  # on its way, not there
        (Way.SHORT, [worker("d", cached=244, size=4), prefill], ASK),  # small blocks: 24 tokens again
        (Way.REMOTE, [worker("d", cached=244, size=2), prefill], ASK),
        (Way.AGGREGATED, [both, prefill], ASK),
    ]
    for way, candidates, ask in table:
        decision = decide(*candidates, ask=ask, policy=policy)
        assert decision.way is way
        assert (decision.prefill is not None) == (way is Way.REMOTE)
        assert decision.reason.startswith(policy)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_full_workers_get_nothing_while_there_are_others(policy: str) -> None:
    full = [replace(worker(name, cached=62), full=True) for name in "ab"]
    for turn in range(8):
        assert names(decide(*full, worker("c", decode=10_000), policy=policy, turn=turn)) == ("c", None)
        assert names(decide(*full, policy=policy, turn=turn))[0] in "ab"


def test_a_limit_of_zero_prefills_remotely_always() -> None:
    ask = replace(ASK, prompt_tokens=16)
    assert decide(worker("d", cached=1), worker("p", "prefill"), ask=ask, local=0).way is Way.REMOTE


def test_prefix_weighs_cache_against_load() -> None:
    cached = worker("p0", "prefill", cached=50)
    assert names(decide(worker("d"), cached, worker("p1", "prefill"))) == ("d", "p0")
    # 800 cached tokens are not worth a queue of 1100.
    busy = worker("p0", "prefill", cached=50, prefill=1100)
    assert names(decide(worker("d"), busy, worker("p1", "prefill"))) == ("d", "p1")
    # What will be there soon counts as well.
    assert names(decide(worker("d"), worker("p0", "prefill"), worker("p1", "prefill", soon=50))) == ("d", "p1")
    assert names(decide(worker("d0", decode=9000), worker("d1", decode=100))) == ("d1", None)


def test_waiting_for_a_prefix_beats_computing_it_again() -> None:
    """The first request has booked what the second would find: as soon done, with less work."""
    first = worker("p0", "prefill", prefill=1000, soon=62)
    assert names(decide(worker("d"), first, worker("p1", "prefill"))) == ("d", "p0")
    # Not if most of the prompt is its own.
    first = worker("p0", "prefill", prefill=1000, soon=12)
    assert names(decide(worker("d"), first, worker("p1", "prefill"))) == ("d", "p1")


def test_a_miss_goes_to_the_idle_worker_however_large_its_cache() -> None:
    ask = replace(ASK, prompt_tokens=2000)
    assert names(decide(worker("a", prefill=5000), worker("b", prefill=10), ask=ask)) == ("b", None)


def test_least_outstanding_does_not_look_at_the_cache() -> None:
    candidates = worker("d0", cached=60, decode=10), worker("d1", decode=9)
    assert names(decide(*candidates, policy="least_outstanding"))[0] == "d1"
    assert names(decide(*candidates, policy="prefix"))[0] == "d0"


def test_round_robin_takes_turns() -> None:
    candidates = [worker(name) for name in ("d0", "d1", "d2")]
    chosen = [names(decide(*candidates, policy=ROUND_ROBIN, turn=turn))[0] for turn in range(6)]
    assert chosen == ["d0", "d1", "d2"] * 2


@pytest.mark.parametrize("policy", ["prefix", "least_outstanding", "random"])
def test_equals_are_chosen_evenly(policy: str) -> None:
    """Chi-square of 4 equal workers, one generator for all decisions."""
    rng = random.Random(7)
    candidates = [worker(f"d{number}") for number in range(4)]
    counts = Counter(
        place(ASK, candidates, policy=policy, local_prefill_tokens=32, turn=0, rng=rng).decode.worker
        for _ in range(1000)
    )
    assert sum((counts[c.worker] - 250) ** 2 / 250 for c in candidates) < 16.3  # p = 0.001 at 3 degrees of freedom


CANDIDATES = st.lists(
    st.builds(
        worker,
        st.uuids().map(str),
        st.sampled_from(["prefill", "decode", "aggregated"]),
        prefill=st.integers(0, 5000),
        decode=st.integers(0, 5000),
        cached=st.integers(0, 100),
        soon=st.integers(0, 100),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.worker,
)


@given(CANDIDATES, st.sampled_from(ALL_POLICIES), st.integers(1, 2000), st.booleans(), st.integers(0, 9), st.integers())
def test_what_holds_for_every_decision(
    candidates: list[Candidate], policy: str, tokens: int, local: bool, turn: int, seed: int
) -> None:
    ask = Ask(tokens, 10, local)

    def once(order: list[Candidate]) -> Decision:
        return place(ask, order, policy=policy, local_prefill_tokens=32, turn=turn, rng=random.Random(seed))

    if not any(candidate.role != "prefill" for candidate in candidates):
        with pytest.raises(NoWorker):
            once(candidates)
        return
    decision = once(candidates)
    assert once(candidates[::-1]) == decision  # the order of a table does not matter
    assert decision.decode in candidates
    assert decision.decode.role in ("decode", "aggregated")
    if decision.prefill is not None:
        assert decision.prefill in candidates
        assert decision.prefill.role == "prefill"
        assert decision.decode.role == "decode"
        assert not local
    if policy in POLICIES:
        able = [c for c in candidates if c.role != "prefill"]
        assert POLICIES[policy](decision.decode, ask) == min(POLICIES[policy](c, ask) for c in able)


def test_one_token_is_always_left_to_compute() -> None:
    assert ASK.uncached(992) == 8
    assert ASK.uncached(1008) == ASK.uncached(10**6) == 1
