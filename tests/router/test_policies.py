"""What each policy costs and draws, on tables with known values. The prefix policy: test_policy.py."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from router_tables import snapshot, worker

from router.policies import POLICIES, Draw, Overlap, session_key
from router.snapshot import Ask

ASK = Ask(prompt_tokens=160, max_tokens=100)


def costs(policy: str, *workers: Any, ask: Ask = ASK, overlap: Overlap = Overlap(), seed: int = 1) -> list[float]:  # noqa: B008
    draw = Draw(np.random.default_rng(seed), overlap)
    return POLICIES[policy](ask, snapshot(*workers), draw).tolist()


def chosen(policy: str, *workers: Any, **fields: Any) -> int:
    found = costs(policy, *workers, **fields)
    return found.index(min(found))


def test_two_choices_take_the_better_of_two() -> None:
    workers = [worker(name, decode=tokens) for name, tokens in (("a", 10), ("b", 20), ("c", 30), ("d", 40))]
    counts: Counter[int] = Counter()
    for seed in range(600):
        found = costs("two_choices", *workers, seed=seed)
        drawn = [row for row, cost in enumerate(found) if math.isfinite(cost)]
        assert len(drawn) == 2 and [found[row] for row in drawn] == [10 * (row + 1) for row in drawn]
        counts[min(drawn)] += 1
    # Of the 6 pairs, 3 have a as the better one, 2 have b, 1 has c; the busiest is never the better one.
    expected = {0: 300, 1: 200, 2: 100}
    assert set(counts) == set(expected)
    assert sum((counts[row] - n) ** 2 / n for row, n in expected.items()) < 13.8  # p = 0.001, 2 degrees of freedom
    assert chosen("two_choices", workers[3]) == 0


def test_overlap_is_the_formula() -> None:
    """(weight x tokens to prefill + tokens kept) / block, with this request."""
    workers = [worker("a", prefill=320, decode=1600, cached=5), worker("b", decode=480), worker("c", cached=10)]
    assert costs("overlap", *workers) == [(320 + 80 + 1600 + 160) / 16, (160 + 480 + 160) / 16, (1 + 160) / 16]
    weighted = costs("overlap", *workers, overlap=Overlap(weight=2.0))
    assert weighted == [(2 * 400 + 1760) / 16, (2 * 160 + 640) / 16, (2 * 1 + 160) / 16]
    assert costs("overlap", *workers, overlap=Overlap(weight=0.0)) == [110, 40, 10]


def test_overlap_with_a_temperature_draws_from_the_softmax() -> None:
    workers = [worker("a"), worker("b", decode=800), worker("c", decode=1600)]  # costs scaled: 0, 0.5, 1
    draws = 3000
    counts = Counter(chosen("overlap", *workers, overlap=Overlap(1.0, 0.5), seed=seed) for seed in range(draws))
    weights = [math.exp(-cost / 0.5) for cost in (0.0, 0.5, 1.0)]
    expected = [draws * weight / sum(weights) for weight in weights]
    assert sum((counts[row] - n) ** 2 / n for row, n in enumerate(expected)) < 13.8
    equal = Counter(
        chosen("overlap", worker("a"), worker("b"), overlap=Overlap(1.0, 0.1), seed=seed) for seed in range(400)
    )
    assert 140 < equal[0] < 260


def test_history_follows_its_own_placements_alone() -> None:
    told, given, idle = worker("a", cached=10), worker("b", soon=9, decode=500), worker("c")
    assert chosen("history", told, given, idle) == 1
    assert chosen("history", told, worker("b", soon=5, decode=500), idle, worker("d", decode=1)) in (0, 2)  # half of it
    assert chosen("history", worker("a", soon=9, decode=2), worker("b", soon=9, decode=1), idle) == 1


def test_history_gives_way_where_load_is_uneven() -> None:
    def busy(requests: int) -> Any:
        return worker("a", soon=10, requests=requests, decode=1000)

    assert chosen("history", busy(32), worker("b")) == 0
    assert chosen("history", busy(33), worker("b")) == 1
    assert chosen("history", busy(150), worker("b", requests=100)) == 0  # not one and a half times as many
    assert chosen("history", busy(151), worker("b", requests=100)) == 1


def test_a_session_stays_and_sessions_spread() -> None:
    names = [f"{number:032x}" for number in range(10)]
    workers = [worker(name) for name in names]
    asks = [replace(ASK, session=session_key(f"user {number}".encode())) for number in range(2000)]
    homes = [chosen("session", *workers, ask=ask, seed=number) for number, ask in enumerate(asks)]
    counts = Counter(homes)
    assert sum((counts[row] - 200) ** 2 / 200 for row in range(10)) < 27.9  # p = 0.001, 9 degrees of freedom
    # One leaves: its sessions spread over the others, nobody else moves.
    left = [chosen("session", *workers[:4], *workers[5:], ask=ask) for ask in asks]
    moved = [row + (row >= 4) for row, home in zip(left, homes, strict=True) if home == 4]
    assert all(row + (row >= 4) == home for row, home in zip(left, homes, strict=True) if home != 4)
    assert len(set(moved)) == 9
    # The order of the table, and load, do not matter.
    turned = [worker(name, decode=100 * number, cached=number) for number, name in enumerate(names)][::-1]
    assert [9 - chosen("session", *turned, ask=ask) for ask in asks] == homes


@pytest.mark.parametrize("policy", ["least_outstanding", "two_choices"])
def test_least_outstanding_counts_what_is_computed_and_what_is_kept(policy: str) -> None:
    assert costs(policy, worker("a", prefill=3, decode=4), worker("b", prefill=10)) == [7, 10]


def test_round_robin_and_random() -> None:
    workers = [worker(name, taken=number) for name, number in (("a", 5), ("b", 3), ("c", 4))]
    assert costs("round_robin", *workers) == [5, 3, 4]
    assert costs("random", *workers) == [0, 0, 0]
