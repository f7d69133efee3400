"""Who goes next, and the bounds that are promised: shares, overtaking, deadlines."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import Admission
from router.fleet import Fleet
from router.queue import FairQueue, Waiting
from router.snapshot import Ask

FAR = 1e9
RATE = 100.0


def waiting(tokens: int = 10, tenant: str = "a", deadline: float = FAR, **fields: int) -> Waiting:
    return Waiting(tenant=tenant, priority=fields.pop("priority", 0), tokens=tokens, deadline=deadline, **fields)


def queue(*requests: Waiting, max_overtaking: int = 4) -> FairQueue[Waiting]:
    made: FairQueue[Waiting] = FairQueue(10_000, 1 << 40, max_overtaking)
    for request in requests:
        made.add(request)
    return made


def drain(made: FairQueue[Waiting], now: float = 0.0) -> list[Waiting]:
    order = []
    while len(made):
        order.append(made.first(now, RATE))
        made.take(order[-1])
    assert made.tokens == 0
    return order


def test_lower_priorities_first_whoever_asks() -> None:
    low, middle, high = waiting(priority=5), waiting(1000), waiting(tenant="b", priority=-3)
    assert drain(queue(low, middle, high)) == [high, middle, low]


def test_a_tenant_that_floods_shares_with_one_that_does_not() -> None:
    flood = [waiting() for _ in range(50)]
    others = [waiting(tenant="b"), waiting(tenant="b")]
    made = queue(*flood)
    for request in flood[:5]:
        made.take(request)
    for request in others:
        made.add(request)
    order = drain(made)
    assert [order.index(request) for request in others] == [0, 2]


def test_weights_are_shares() -> None:
    """And what is said to be ahead of a newcomer is what goes before it."""
    made = queue(*(waiting(tenant="heavy", weight=3) for _ in range(40)), *(waiting(tenant="light") for _ in range(40)))
    got: Counter[str] = Counter()
    for _ in range(40):
        first = made.first(0.0, RATE)
        made.take(first)
        got[first.tenant] += first.tokens
    assert abs(got["heavy"] - 3 * got["light"]) <= 30
    for tenant, weight in (("heavy", 3), ("light", 1), ("new", 2)):
        newcomer = waiting(10_000, tenant=tenant, weight=weight)
        ahead = made.ahead(newcomer, 0.0, RATE)
        made.add(newcomer)
        order = drain(made)
        before = sum(each.tokens for each in order[: order.index(newcomer)])
        assert abs(before - ahead) <= 30, tenant
        for each in order:
            if each is not newcomer:
                made.add(each)


def test_a_tenant_that_leaves_and_comes_back_still_owes() -> None:
    """One large request at a time is no way around the shares."""
    made = queue(*(waiting() for _ in range(100)))
    made.add(waiting(500, tenant="b"))
    got: Counter[str] = Counter()
    for _ in range(60):
        first = made.first(0.0, RATE)
        made.take(first)
        got[first.tenant] += first.tokens
        if first.tenant == "b":
            made.add(waiting(500, tenant="b"))
    assert abs(got["a"] - got["b"]) <= 500


def test_to_have_waited_long_ago_gains_nothing() -> None:
    made = queue(*(waiting() for _ in range(100)), waiting(tenant="b"))
    for _ in range(50):
        made.take(made.first(0.0, RATE))
    for _ in range(20):
        made.add(waiting(tenant="b"))
    assert Counter(each.tenant for each in drain(made)[:20]) == {"a": 10, "b": 10}


def test_short_ones_pass_a_long_one_until_it_has_let_enough_pass() -> None:
    long, short = waiting(100), [waiting(10) for _ in range(60)]
    order = drain(queue(long, *short))
    assert order.index(long) == 36  # 360 tokens passed, and 40 more may: no more than the next short one allows
    assert [each for each in order if each is not long] == short


def test_a_short_one_passes_all_long_ones() -> None:
    longs, short = [waiting(1000) for _ in range(20)], waiting(10)
    assert drain(queue(*longs, short))[0] is short


def test_the_deadline_that_comes_first() -> None:
    late, soon, sooner = (waiting(deadline=at) for at in (0.6, 0.4, 0.2))
    assert drain(queue(late, soon, sooner)) == [sooner, soon, late]
    far, near = waiting(deadline=500.0), waiting(deadline=400.0)
    assert drain(queue(far, near)) == [near, far]  # both have time enough, and equal sizes
    long, short = waiting(100, deadline=1.0), waiting(10)
    assert drain(queue(short, long)) == [long, short]  # it would be too late


def test_what_is_placed_again_goes_first() -> None:
    first, again = waiting(1), waiting(1000, resumes=True)
    assert drain(queue(first, again)) == [again, first]


def test_whoever_leaves_is_forgotten() -> None:
    first, second, other = waiting(), waiting(5), waiting(7, tenant="b")
    made = queue(first, second, other)
    made.remove(second)
    made.remove(other)
    assert (len(made), made.tokens) == (1, 10)
    assert drain(made) == [first]


def test_bounds_by_number_and_by_tokens() -> None:
    made: FairQueue[Waiting] = FairQueue(2, 100)
    assert made.fits(1000)  # alone it may be larger
    made.add(waiting(60))
    assert made.fits(40) and not made.fits(41)
    made.add(waiting(1))
    assert not made.fits(1)
    assert not FairQueue[Waiting](0, 0).fits(1)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, float] | None]:
    """Arrivals (tenant, tokens, seconds until the deadline), and None: the first one goes."""
    arrival = st.tuples(st.sampled_from("abc"), st.integers(1, 200), st.sampled_from([0.5, 3.0, 600.0]))
    return draw(st.lists(st.one_of(arrival, arrival, st.none()), min_size=1, max_size=120))


@given(histories(), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_nobody_is_overtaken_by_more_than_is_promised(
    history: list[tuple[str, int, float] | None], max_overtaking: int
) -> None:
    """Counted here, by arrival, not by the queue's own books; and whoever is in comes out."""
    made = queue(max_overtaking=max_overtaking)
    inside: list[Waiting] = []
    passed: Counter[Waiting] = Counter()
    for step, event in enumerate([*history, *[None] * len(history)]):
        now = 0.01 * step
        if event is not None:
            tenant, tokens, seconds = event
            inside.append(waiting(tokens, tenant, now + seconds))
            made.add(inside[-1])
        elif inside:
            first = made.first(now, RATE)
            made.take(first)
            for earlier in inside[: inside.index(first)]:
                if earlier.tenant == first.tenant:
                    assert passed[earlier] < max_overtaking * earlier.tokens
                    passed[earlier] += first.tokens
            inside.remove(first)
    assert not inside and not len(made)


@given(st.lists(st.lists(st.integers(1, 300), min_size=40, max_size=40), min_size=2, max_size=4))
@settings(max_examples=100, deadline=None)
def test_tenants_that_wait_all_the_time_get_equal_tokens(sizes: list[list[int]]) -> None:
    made = queue(*(waiting(tokens, str(tenant)) for tenant, all_ in enumerate(sizes) for tokens in all_))
    got: Counter[str] = Counter({str(tenant): 0 for tenant in range(len(sizes))})
    left = dict.fromkeys(got, 40)
    while all(left.values()):
        first = made.first(0.0, RATE)
        made.take(first)
        got[first.tenant] += first.tokens
        left[first.tenant] -= 1
        assert max(got.values()) - min(got.values()) <= 300


@given(histories(), st.tuples(st.sampled_from("abcd"), st.integers(1, 200)))
@settings(max_examples=100, deadline=None)
def test_what_is_said_to_be_ahead_goes_before(
    history: list[tuple[str, int, float] | None], newcomer: tuple[str, int]
) -> None:
    """Within the largest request of each other tenant; it may be more where patience ends meanwhile."""
    made = queue()
    for event in history:
        if event is not None:
            made.add(waiting(event[1], event[0]))
        elif len(made):
            made.take(made.first(0.0, RATE))
    last = waiting(newcomer[1], newcomer[0])
    told = made.ahead(last, 0.0, RATE)
    made.add(last)
    before = 0
    while (first := made.first(0.0, RATE)) is not last:
        before += first.tokens
        made.take(first)
    assert told - before <= 3 * 200


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_what_is_ahead_of_a_priority(priority: int) -> None:
    made = queue(waiting(100, priority=-1), waiting(50), waiting(30, "b"), waiting(7, priority=1))
    assert made.ahead(waiting(60, "c", priority=priority), 0.0, RATE) == {-1: 0, 0: 100, 1: 180}[priority]


def test_who_comes_when_all_workers_have_left_is_told_so_in_turn() -> None:
    """Others still stand in line at that moment; each finds at once that nobody can decode."""
    table, admission = Fleet().table, Admission[Waiting](max_requests=10, slo_ttft=1.0)
    for _ in range(2):
        admission.queue.add(waiting())
    admission.enter(waiting(), Ask(10, 10), table, np.zeros(len(table)), now=0.0)
    assert len(admission.queue) == 3


def test_the_rate_does_not_depend_on_who_comes_first() -> None:
    """The first one that a router holds may be a request that is placed again."""
    fleet = Fleet()
    fleet.set(fleet.join("p"), ready=True, prefills=True, prefill_rate=1000.0)
    admission = Admission[Waiting](max_requests=10, slo_ttft=1.0)
    first = waiting()
    first.resumes = True
    admission.enter(first, Ask(10, 10), fleet.table, np.zeros(len(fleet.table)), now=50.0)
    assert admission.rate(fleet.table, 50.0) == 1000.0
