"""Decisions on tables, and what holds for all of them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_tables import ASK, snapshot, worker

from router.cost import Objectives
from router.fleet import TPOT_PRIOR
from router.policies import POLICIES, Draw
from router.policy import Decision, NoWorker, Way, place
from router.snapshot import Ask


def decide(
    *workers: Any,
    ask: Ask = ASK,
    policy: str = "prefix",
    local: int = 32,
    fetch: int = 0,
    objectives: Objectives = Objectives(),  # noqa: B008
) -> Decision:
    draw = Draw(np.random.default_rng(1), objectives=objectives)
    workers_now = snapshot(*workers, ask=ask, fetch_tokens=fetch)
    return place(ask, workers_now, policy=policy, local_prefill_tokens=local, draw=draw)


def names(decision: Decision, *workers: Any) -> tuple[str, str | None]:
    told = [row["worker"].decode() for row, _, _ in workers]
    return told[decision.decode], None if decision.prefill is None else told[decision.prefill]


def decided(*workers: Any, **fields: Any) -> tuple[str, str | None]:
    return names(decide(*workers, **fields), *workers)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [[], [worker("p", "prefill")], [worker("d", ready=False)]])
def test_nobody_to_decode(policy: str, workers: list[Any]) -> None:
    with pytest.raises(NoWorker):
        decide(*workers, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_ways(policy: str) -> None:
    decode, prefill, both = worker("d"), worker("p", "prefill", cached=61), worker("a", "aggregated")
    table: list[tuple[Way, list[Any], Ask]] = [
        (Way.REMOTE, [decode, prefill], ASK),
        (Way.ALONE, [decode], ASK),
        (Way.ALONE, [decode, worker("p", "prefill", ready=False)], ASK),
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
    for way, workers, ask in table:
        decision = decide(*workers, ask=ask, policy=policy)
        assert decision.way is way
        assert (decision.prefill is not None) == (way is Way.REMOTE)
        assert decision.reason.startswith(policy)


def test_requests_that_wait_for_blocks_cost_but_do_not_decide_alone() -> None:
    """One waiting request, 50 ms at first, must not divert all traffic from a worker together with its cache."""
    cached = worker("a", cached=62, waiting_for_blocks=1)
    assert decided(cached, worker("b"))[0] == "a"  # 992 tokens spared, 99 ms
    assert decided(worker("a", cached=62, waiting_for_blocks=4), worker("b"))[0] == "b"
    assert decided(worker("a", cached=8, waiting_for_blocks=1), worker("b"))[0] == "b"
    assert decided(worker("a", waiting_for_blocks=1), worker("b", waiting_for_blocks=2))[0] == "a"


def test_what_can_be_fetched_is_nearly_cached() -> None:
    """A fetch of 800 tokens takes as long as computing 200 until it is measured, and then what was measured."""

    def choose(queue: int, **columns: float) -> str:
        return decided(worker("a", cached=50, prefill=queue), worker("b", **columns), fetch=256)[0]

    assert choose(170) == "a" and choose(215) == "b"
    measured = {"prefill_rate": 10_000.0, "fetch_rate": 100_000.0}
    assert choose(65, **measured) == "a" and choose(95, **measured) == "b"
    unable = {"fetches": False}
    assert choose(900, **unable) == "a" and choose(1100, **unable) == "b"
    # What the KV service has as well comes at the rate of that.
    rates = {"prefill_rate": 10_000.0, "fetch_rate": [12_000.0, 100_000.0, np.nan, np.nan, np.nan]}
    kept = worker("k", cached=50, decodes=False, aggregated=False, tier=1)
    assert decided(worker("a", cached=50, prefill=95), worker("b", **rates), fetch=256)[0] == "a"
    assert decided(worker("a", cached=50, prefill=95), worker("b", **rates), kept, fetch=256)[0] == "b"


def test_a_hot_prefix_spreads_before_its_worker_queues() -> None:
    """To decode beside many, or to wait, takes longer than to compute it elsewhere: all that is predicted."""
    others = [worker("b"), worker("c"), worker("d")]
    assert decided(worker("a", cached=62, requests=6, decode=6_000), *others)[0] == "a"
    assert decided(worker("a", cached=62, requests=60, decode=60_000), *others)[0] in "bcd"
    busy = [worker(name, requests=50, decode=50_000) for name in "bcd"]
    assert decided(worker("a", cached=62, requests=60, decode=60_000), *busy)[0] == "a"
    assert decided(worker("a", cached=62, prefill=1500), *others)[0] in "bcd"
    assert decided(worker("a", cached=62, requests=1000))[0] == "a"  # it is alone


def test_objectives_come_before_cost() -> None:
    """The cached worker is the cheapest, but its answers would be too slow."""
    slow, other = worker("a", cached=62, decode=20_000), worker("b")
    assert decided(slow, other)[0] == "a"
    assert decided(slow, other, objectives=Objectives(tpot=0.010))[0] == "b"
    assert decided(slow, other, objectives=Objectives(ttft=0.05, tpot=0.1))[0] == "a"  # the other's first token is late
    assert decided(slow, other, objectives=Objectives(ttft=0.05, tpot=0.010))[0] == "a"  # none meets both


def test_a_prompt_is_computed_where_it_is_decoded_if_prefill_workers_have_far_more_to_do() -> None:
    busy, idle = worker("p", "prefill", prefill=5000), worker("p", "prefill")
    assert decide(worker("d"), busy).way is Way.SOONER
    assert decide(worker("d"), idle).way is Way.REMOTE
    assert decide(worker("d", requests=40, decode=40_000), busy).way is Way.REMOTE  # all its answers would wait
    assert decide(worker("d"), busy, local=0).way is Way.REMOTE
    late = Objectives(ttft=0.2)
    assert decide(worker("d"), worker("p", "prefill", prefill=1000), objectives=late).way is Way.SOONER
    nearly = worker("d", cached=60)  # 40 tokens are missing, to the other one all
    assert decide(nearly, idle).way is Way.SOONER
    assert decide(nearly, worker("p", "prefill", cached=60)).way is Way.REMOTE
    # Of two decode workers the one that has most of it computes the rest rather than to wait.
    assert decided(worker("d0"), worker("d1", cached=50), busy) == ("d1", None)


def test_a_limit_of_zero_prefills_remotely_always() -> None:
    ask = replace(ASK, prompt_tokens=16)
    assert decide(worker("d", cached=1), worker("p", "prefill"), ask=ask, local=0).way is Way.REMOTE


def test_prefix_weighs_cache_against_load() -> None:
    cached = worker("p0", "prefill", cached=50)
    assert decided(worker("d"), cached, worker("p1", "prefill")) == ("d", "p0")
    # 800 cached tokens are not worth a queue of 1100.
    busy = worker("p0", "prefill", cached=50, prefill=1100)
    assert decided(worker("d"), busy, worker("p1", "prefill")) == ("d", "p1")
    # What will be there soon counts as well.
    assert decided(worker("d"), worker("p0", "prefill"), worker("p1", "prefill", soon=50)) == ("d", "p1")
    assert decided(worker("d0", decode=9000), worker("d1", decode=100)) == ("d1", None)


def test_waiting_for_a_prefix_beats_computing_it_again() -> None:
    """The first request has booked what the second would find: as soon done, with less work."""
    first = worker("p0", "prefill", prefill=1000, soon=62)
    assert decided(worker("d"), first, worker("p1", "prefill")) == ("d", "p0")
    # Not if most of the prompt is its own.
    first = worker("p0", "prefill", prefill=1000, soon=12)
    assert decided(worker("d"), first, worker("p1", "prefill")) == ("d", "p1")


def test_a_miss_goes_to_the_idle_worker_however_large_its_cache() -> None:
    ask = replace(ASK, prompt_tokens=2000)
    assert decided(worker("a", prefill=5000), worker("b", prefill=10), ask=ask) == ("b", None)


def test_least_outstanding_does_not_look_at_the_cache() -> None:
    workers = worker("d0", cached=60, decode=10), worker("d1", decode=9)
    assert decided(*workers, policy="least_outstanding")[0] == "d1"
    assert decided(*workers, policy="prefix")[0] == "d0"


@pytest.mark.parametrize("policy", ["prefix", "least_outstanding", "random"])
def test_equals_are_chosen_evenly(policy: str) -> None:
    """Chi-square of 4 equal workers, one generator for all decisions."""
    draw = Draw(np.random.default_rng(7))
    workers = snapshot(*(worker(f"d{number}") for number in range(4)))
    counts = Counter(place(ASK, workers, policy=policy, local_prefill_tokens=32, draw=draw).decode for _ in range(1000))
    assert sum((counts[row] - 250) ** 2 / 250 for row in range(4)) < 16.3  # p = 0.001 at 3 degrees of freedom


def drawn(*workers: Any, objectives: Objectives = Objectives(), tolerance: float = 0.05) -> Counter[str]:  # noqa: B008
    """How often each is chosen to decode, of 400 times."""
    draw = Draw(np.random.default_rng(7), tolerance=tolerance, objectives=objectives)
    now = snapshot(*workers)
    placed = (place(ASK, now, policy="prefix", local_prefill_tokens=32, draw=draw) for _ in range(400))
    return Counter(workers[decision.decode][0]["worker"].decode() for decision in placed)


def test_what_is_predicted_to_cost_nearly_the_same_is_chosen_evenly() -> None:
    """A worker that was a hair quicker must not get everything."""
    quick, slow = worker("a"), worker("b", tpot=TPOT_PRIOR * 1.04)
    slower, busy = worker("c", tpot=TPOT_PRIOR * 1.2), worker("d", prefill=500)
    counts = drawn(quick, slow, slower, busy)
    assert set(counts) == {"a", "b"} and 150 < counts["a"] < 250
    assert set(drawn(quick, slow, tolerance=0.0)) == {"a"}
    assert set(drawn(quick, slower, tolerance=0.5)) == {"a", "c"}


def test_a_prefix_found_decides_among_those_that_cost_nearly_the_same() -> None:
    """100 tokens are worth less than the tolerance where answers are long."""
    assert set(drawn(worker("a"), worker("b", cached=7, tpot=TPOT_PRIOR * 1.04), worker("c"))) == {"b"}
    assert set(drawn(worker("a"), worker("b", cached=62), worker("c", cached=62))) == {"b", "c"}
    assert set(drawn(worker("a", cached=60), worker("b", cached=62))) == {"a", "b"}  # 32 tokens of 1000


def test_where_all_miss_an_objective_costs_are_compared_as_closely() -> None:
    late = Objectives(ttft=0.001, tpot=0.001)
    assert set(drawn(worker("a"), worker("b", prefill=500), worker("c"), objectives=late)) == {"a", "c"}


WORKERS = st.lists(
    st.builds(
        worker,
        st.just("w"),
        st.sampled_from(["prefill", "decode", "aggregated"]),
        prefill=st.integers(0, 5000),
        decode=st.integers(0, 5000),
        cached=st.integers(0, 100),
        soon=st.integers(0, 100),
        ready=st.booleans(),
    ),
    max_size=6,
)


@given(WORKERS, st.sampled_from(list(POLICIES)), st.integers(1, 2000), st.booleans())
def test_what_holds_for_every_decision(workers: list[Any], policy: str, tokens: int, local: bool) -> None:
    ask = Ask(tokens, 10, local)
    able = [row for row, _, _ in workers if row["ready"] and not row["prefills"]]
    if not able:
        with pytest.raises(NoWorker):
            decide(*workers, ask=ask, policy=policy)
        return
    decision = decide(*workers, ask=ask, policy=policy)
    assert decide(*workers, ask=ask, policy=policy) == decision  # nothing else decides
    decode = workers[decision.decode][0]
    assert decode["ready"] and decode["decodes"]
    if decision.prefill is not None:
        prefill = workers[decision.prefill][0]
        assert prefill["ready"] and prefill["prefills"] and not decode["aggregated"] and not local


def test_one_token_is_always_left_to_compute() -> None:
    assert ASK.uncached(np.array([992, 1008, 10**6])).tolist() == [8, 1, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_remembers_its_best_candidates(policy: str) -> None:
    workers = [worker(f"d{number}", decode=100 * number) for number in range(12)] + [worker("p", "prefill")]
    decision = decide(*workers, policy=policy)
    decoding, prefilling = decision.choices
    assert (decoding.role, decoding.candidates, prefilling.role, prefilling.candidates) == (
        "decodes",
        12,
        "prefills",
        1,
    )
    assert (decoding.winner, prefilling.winner) == (decision.decode, decision.prefill)
    assert len(set(decoding.rows.tolist())) == 8
    assert decoding.costs.tolist() == sorted(decoding.costs.tolist())
    assert decoding.workers.table["decode_tokens"].tolist() == [100 * row for row in decoding.rows]
