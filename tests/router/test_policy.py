"""Placement as tables, and reservations that always balance."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import Ask, Candidate, Decision, NoWorker, place
from router.reservations import Outstanding, Reservation, Reservations

ASK = Ask(prompt_tokens=160, max_tokens=50, block_size=16)


def worker(name: str, role: str, *, prefill: int = 0, decode: int = 0, cached: int = 0) -> Candidate:
    return Candidate(name, role, Outstanding(1, prefill, decode), cached)


def decide(*candidates: Candidate, ask: Ask = ASK, policy: str = "prefix", turn: int = 0, local: int = 32) -> Decision:
    rng = random.Random(1)
    return place(ask, candidates, policy=policy, local_prefill_tokens=local, turn=turn, rng=rng)


def test_nobody_decodes() -> None:
    with pytest.raises(NoWorker):
        decide(worker("p", "prefill"))


def test_prefill_goes_to_the_cached_prefix_unless_it_is_busy() -> None:
    candidates = [worker("p0", "prefill"), worker("p1", "prefill", cached=8), worker("d", "decode")]
    decision = decide(*candidates)
    assert decision.prefill is not None and decision.prefill.worker == "p1"
    busy = [worker("p0", "prefill"), worker("p1", "prefill", cached=8, prefill=5000), worker("d", "decode")]
    decision = decide(*busy)
    assert decision.prefill is not None and decision.prefill.worker == "p0"


@pytest.mark.parametrize(
    ("candidates", "ask", "reason"),
    [
        ([worker("d", "decode")], ASK, "no prefill worker"),
        ([worker("a", "aggregated"), worker("p", "prefill")], ASK, "aggregated"),
        ([worker("d", "decode", cached=9), worker("p", "prefill")], ASK, "only 16 prompt tokens"),
        ([worker("d", "decode"), worker("p", "prefill")], Ask(160, 50, 16, local_prefill_only=True), "asked for"),
    ],
)
def test_local_prefill(candidates: list[Candidate], ask: Ask, reason: str) -> None:
    decision = decide(*candidates, ask=ask)
    assert decision.prefill is None
    assert reason in decision.reason


def test_decode_goes_to_the_least_loaded() -> None:
    assert decide(worker("d0", "decode", decode=900), worker("d1", "decode", decode=10)).decode.worker == "d1"
    # A miss goes to the idle worker, however large the other's cache is.
    ask = Ask(160, 50, 16)
    assert decide(worker("d0", "decode", prefill=4000), worker("d1", "decode"), ask=ask).decode.worker == "d1"


def test_round_robin_takes_turns_and_random_spreads() -> None:
    candidates = [worker(name, "decode") for name in ("a", "b", "c")]
    turns = [decide(*candidates, policy="round_robin", turn=turn).decode.worker for turn in range(6)]
    assert turns == ["a", "b", "c", "a", "b", "c"]
    rng = random.Random(5)
    picks = Counter(
        place(ASK, candidates, policy="random", local_prefill_tokens=0, turn=0, rng=rng).decode.worker
        for _ in range(900)
    )
    assert all(230 < count < 370 for count in picks.values())


keys = st.tuples(st.sampled_from("xyz"), st.integers(0, 2))
steps = st.lists(
    st.tuples(st.sampled_from(["reserve", "release", "expire", "forget"]), keys, st.integers(0, 10)), max_size=40
)


@given(steps)
def test_reservations_balance(ops: list[tuple[str, tuple[str, int], int]]) -> None:
    book = Reservations()
    model: dict[tuple[str, int], Reservation] = {}
    for kind, key, number in ops:
        if kind == "reserve":
            reservation = Reservation("d", "p" if number % 2 else None, number, 2 * number, number, 0)
            book.reserve(*key, reservation)
            model[key] = reservation
        elif kind == "release":
            assert book.release(*key) == model.pop(key, None)
        elif kind == "expire":
            book.expire(number)
            model = {k: r for k, r in model.items() if r.expires > number}
        else:
            book.forget("p")
            model = {k: r for k, r in model.items() if r.prefill != "p"}
        assert len(book) == len(model)
        assert book.of("d").requests == len(model)
        assert book.of("d").decode_tokens == sum(r.decode_tokens for r in model.values())
        assert book.of("p").requests == sum(r.prefill == "p" for r in model.values())
        prefill = sum(r.prefill_tokens for r in model.values())
        assert book.of("d").prefill_tokens + book.of("p").prefill_tokens == prefill
