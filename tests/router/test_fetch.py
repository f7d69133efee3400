"""When a prefix is fetched, on tables."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fetch import source_for
from router.policy import Ask, Candidate
from router.reservations import Outstanding

ASK = Ask(prompt_tokens=1000, max_tokens=100)
SIZE = 16


def worker(name: str, cached: int = 0, *, prefill: int = 0, layout: str = "l") -> Candidate:
    return Candidate(name, "aggregated", Outstanding(0, prefill, 0), SIZE, cached, cached, layout=layout)


def source(computing: Candidate, *others: Candidate, ask: Ask = ASK, least: int = 256) -> str | None:
    found = source_for(computing, ask, [computing, *others], fetch_tokens=least)
    return found.worker if found else None


def test_who_has_enough_more_is_the_source() -> None:
    assert source(worker("a"), worker("b", 16)) == "b"
    assert source(worker("a"), worker("b", 15)) is None
    assert source(worker("a", 8), worker("b", 23)) is None
    assert source(worker("a", 8), worker("b", 24)) == "b"
    assert source(worker("a", 40), worker("b", 16)) is None
    assert source(worker("a")) is None
    # The last token is computed in any case, so a prompt that is wholly cached counts one less.
    exactly = replace(ASK, prompt_tokens=256)
    assert source(worker("a"), worker("b", 16), ask=exactly) is None
    assert source(worker("a"), worker("b", 16), ask=exactly, least=255) == "b"


def test_never_where_it_is_switched_off_or_of_no_use() -> None:
    have = worker("b", 60)
    assert source(worker("a"), have, least=0) is None
    assert source(worker("a"), have, ask=replace(ASK, local_prefill_only=True)) is None  # scores of all tokens
    assert source(worker("a"), worker("b", 60, layout="other")) is None
    assert source(replace(worker("a"), fetch_rate=0.0), have) is None


@pytest.mark.parametrize(
    ("prefill_rate", "fetch_rate", "fetches"),
    [
        (None, None, True),
        (1000.0, None, True),
        (None, 10.0, True),
        (1000.0, 1001.0, True),
        (1000.0, 1000.0, False),
        (1000.0, 10.0, False),
    ],
)
def test_what_was_measured_decides(prefill_rate: float | None, fetch_rate: float | None, fetches: bool) -> None:
    computing = replace(worker("a"), prefill_rate=prefill_rate, fetch_rate=fetch_rate)
    assert (source(computing, worker("b", 60)) == "b") == fetches


def test_the_one_with_most_and_then_the_least_busy() -> None:
    assert source(worker("a"), worker("b", 20), worker("c", 21, prefill=9000)) == "c"
    assert source(worker("a"), worker("b", 20, prefill=10), worker("c", 20)) == "c"


@given(st.lists(st.tuples(st.integers(0, 62), st.integers(0, 2)), min_size=2, max_size=6), st.integers())
def test_the_order_of_a_table_does_not_matter(table: list[tuple[int, int]], seed: int) -> None:
    computing, *others = [worker(f"w{n}", cached, prefill=load) for n, (cached, load) in enumerate(table)]
    shuffled = random.Random(seed).sample(others, len(others))
    assert source(computing, *others) == source(computing, *shuffled)
