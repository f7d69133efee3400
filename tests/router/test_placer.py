"""The router's view as a whole: workers that come, go and come back in rows of others."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.hashing import block_hashes
from engine.request import BlockStored
from router.placer import Placed, Placer
from router.policy import NoWorker, Way
from router.snapshot import Ask

CHAIN = block_hashes(range(160), 16, b"root")
ASK = Ask(prompt_tokens=165, max_tokens=10)


def made(*workers: str, **settings: object) -> Placer:
    fields: dict[str, object] = {"policy": "prefix", "local_prefill_tokens": 32, "fetch_tokens": 0, "seed": 1}
    placer = Placer(**fields | settings)  # type: ignore[arg-type]
    for name in workers:
        join(placer, name)
    return placer


def join(placer: Placer, name: str, layout: str = "l") -> int:
    row = placer.fleet.join(name)
    number = placer.fleet.layout(layout)
    placer.fleet.set(row, ready=True, decodes=True, aggregated=True, layout=number, block_size=16)
    return row


def place(placer: Placer, key: str, *excluded: str, now: float = 0.0, layout: str = "l") -> Placed:
    return placer.place((key, 0), ASK, [(layout, CHAIN)], excluded, now=now, lease=10.0)


def test_a_row_that_is_used_again_knows_nothing_of_the_one_before() -> None:
    placer = made("a", "b")
    row = placer.fleet.row("a")
    assert row is not None
    placer.index.apply(row, [BlockStored(CHAIN)])
    assert place(placer, "x").decision.decode == row  # its blocks are there, and expected
    placer.leave("a")
    assert join(placer, "c") == row
    placed = place(placer, "y", "b")
    assert placed.decision.decode == row
    assert placed.snapshot.cached_blocks[row] == placed.snapshot.recalled_blocks[row] == 0
    assert placer.fleet.table["requests"][row] == 1
    placer.reservations.release("x", 0)  # late; of the worker that is gone
    assert placer.fleet.table["requests"][row] == 1


def test_more_workers_than_rows_at_first() -> None:
    placer = made("first")
    place(placer, "x")
    rows = [join(placer, f"w{number}") for number in range(100)]
    assert len({placer.fleet.row("first"), *rows}) == 101
    assert placer.fleet.table["requests"].sum() == 1
    placer.index.apply(rows[-1], [BlockStored(CHAIN)])
    assert place(placer, "y", "first").decision.decode == rows[-1]


def test_excluded_workers_get_nothing_and_stay_ready() -> None:
    placer = made("a", "b")
    for number in range(5):
        assert place(placer, f"x{number}", "a", "unknown").decision.decode == placer.fleet.row("b")
    with pytest.raises(NoWorker):
        place(placer, "y", "a", "b")
    assert placer.fleet.table["ready"].sum() == 2


def test_turns_are_taken_whatever_is_asked_for_in_between() -> None:
    """Of two kinds of requests that alternate neither keeps to every other worker; who is new or back gets its turn."""
    placer = made("a", "b", policy="round_robin")
    for name in ("p", "q"):
        placer.fleet.set(join(placer, name), decodes=False, aggregated=False, prefills=True)
    for name in ("a", "b"):
        placer.fleet.set(join(placer, name), aggregated=False)
    for asks in ((ASK, replace(ASK, local_prefill_only=True)), (ASK,)):
        taken = Counter[int | None]()
        for number in range(24):
            ask = asks[number % len(asks)]
            decision = placer.place((f"{number}", 0), ask, [], (), now=0.0, lease=9.0).decision
            taken.update((decision.decode, decision.prefill))
        assert taken[0] == taken[1] == 12 and taken[2] == taken[3] == 12 / len(asks)
    assert [place(placer, f"x{number}", "a").decision.decode for number in range(3)] == [1, 1, 1]
    row = join(placer, "new")
    assert {place(placer, f"y{number}").decision.decode for number in range(2)} == {row, 0}


@pytest.mark.parametrize("policy", ["prefix", "random", "two_choices", "least_outstanding"])
def test_picks_of_one_moment_are_spread(policy: str) -> None:
    """Chi-square of 1,000 placements on 8 equal workers, by routers that nobody gave a seed: no two draw alike."""
    first, second = (made(*"abcdefgh", policy=policy, seed=None) for _ in range(2))
    rows = []
    for placer in (first, second):
        rows.append([])
        for number in range(1000):
            decision = placer.place((f"{number}", 0), ASK, [], (), now=0.0, lease=9.0).decision
            rows[-1].append(decision.decode)
            placer.reservations.release(f"{number}", 0)
    for taken in rows:
        counts = np.bincount(taken, minlength=8)
        assert ((counts - 125) ** 2 / 125).sum() < 35  # p = 0.00001 at 7 degrees of freedom
    assert rows[0] != rows[1]


def test_a_decode_worker_that_has_computed_no_prompt_is_not_believed_to_be_quicker_than_the_others() -> None:
    placer = made("p", "d")
    placer.fleet.set(join(placer, "p"), prefills=True, decodes=False, aggregated=False, prefill_rate=100.0)
    placer.fleet.set(join(placer, "d"), aggregated=False)
    decision = place(placer, "x").decision
    assert decision.way is Way.REMOTE and decision.ttft > 1.5  # 165 tokens
    asked = replace(ASK, local_prefill_only=True)
    assert placer.place(("y", 0), asked, [], (), now=0.0, lease=9.0).decision.ttft > 1.5


def test_what_is_expected_stays_expected_for_its_time() -> None:
    placer = made("a", "b", "c", "d")
    first = place(placer, "x").decision.decode
    assert place(placer, "y", now=1.0).decision.decode == first
    placer.tick(100.0)
    assert place(placer, "z", now=100.0).snapshot.recalled_blocks.tolist() == [0] * len(placer.fleet.table)


def test_a_worker_of_another_layout_has_nothing_of_the_chain() -> None:
    placer = made("a")
    other = join(placer, "b", "l2")
    placed = place(placer, "x", "a", layout="l")
    assert placed.decision.decode == other
    assert np.flatnonzero(place(placer, "y", "a", layout="l").snapshot.recalled_blocks).tolist() == []
    assert place(placer, "z", "a", layout="l2").decision.decode == other
    assert place(placer, "w", "a", layout="l2").snapshot.recalled_blocks[other] == len(CHAIN)


def test_history_remembers_without_events_and_longer() -> None:
    placer = made("a", "b", "c", "d", policy="history")
    first = place(placer, "x").decision.decode
    for number in range(12):  # what was told plays no part
        placer.index.apply((first + 1) % 4, [BlockStored(CHAIN)])
        assert place(placer, f"y{number}", now=10.0 * number).decision.decode == first
    placer.tick(1000.0)
    assert place(placer, "z", now=1000.0).decision.decode != first  # forgotten: the others have less to do


def test_a_hot_prefix_spreads_and_whoever_is_next_fetches_it() -> None:
    """100 at once of one long prompt, of which one worker has all: each gets its share, without computing it again."""
    chain = block_hashes(range(8000), 16, b"hot")
    placer = made("a", "b", "c", "d", fetch_tokens=256)
    rows = {name: placer.fleet.row(name) for name in "abcd"}
    for row in rows.values():
        placer.fleet.set(row, fetches=True, sends=True, prefill_rate=np.nan, fetch_rate=np.nan)
    placer.index.apply(rows["a"], [BlockStored(chain)])
    ask = Ask(prompt_tokens=8001, max_tokens=100)
    placed = [placer.place((f"{n}", 0), ask, [("l", chain)], (), now=0.0, lease=10.0) for n in range(100)]
    first = [each.decision.decode for each in placed[:3]]
    assert first == [rows["a"]] * 3  # it stays as long as that costs nothing
    assert all((each.source is None) == (each.decision.decode == rows["a"]) for each in placed)
    assert {each.source for each in placed} == {None, rows["a"]}
    assert max(placer.fleet.table["requests"]) <= 1.25 * 25 + 8 and min(placer.fleet.table["requests"][:4]) >= 15
    assert placer.fleet.table["prefill_tokens"].sum() == 100  # the last token of each, nothing else is computed
