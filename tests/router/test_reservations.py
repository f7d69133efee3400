"""Booked load, against a list of what is under way."""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.fleet import Fleet
from router.reservations import Reservation, Reservations

D0, D1, P0, P1 = range(4)  # rows
DECODE = [D0, D1]
PREFILL = [P0, P1, None]


def reservation(
    decode: int = D0,
    prefill: int | None = P0,
    prefill_tokens: int = 100,
    decode_tokens: int = 120,
    until: float = 10.0,
    booked: float = 0.0,
) -> Reservation:
    return Reservation(decode, prefill, prefill_tokens, decode_tokens, booked, until, 0)


def made() -> tuple[Fleet, Reservations]:
    fleet = Fleet()
    for name in ("d0", "d1", "p0", "p1"):
        fleet.join(name)
    return fleet, Reservations(fleet)


def booked(fleet: Fleet, row: int) -> tuple[int, float, float]:
    """Requests, tokens to prefill, tokens kept."""
    requests, prefill, decode = fleet.table[["requests", "prefill_tokens", "decode_tokens"]][row].tolist()
    return requests, prefill, decode


def expected(attempts: dict[tuple[str, int], Reservation], row: int) -> tuple[int, float, float]:
    requests = prefill = decode = 0
    for entry in attempts.values():
        requests += row in (entry.decode, entry.prefill)
        decode += entry.decode_tokens if entry.decode == row else 0
        computing = entry.decode if entry.prefill is None else entry.prefill
        prefill += entry.prefill_tokens if computing == row else 0
    return requests, prefill, decode


class BookingsAreTheModel(RuleBasedStateMachine):
    """Placed, released twice, expired, workers lost and back under the same incarnation."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.reservations = made()
        self.now = 0.0
        self.model: dict[tuple[str, int], Reservation] = {}

    @rule(
        request=st.sampled_from("xyz"),
        attempt=st.integers(0, 1),
        decode=st.sampled_from(DECODE),
        prefill=st.sampled_from(PREFILL),
        tokens=st.integers(1, 1000),
        lease=st.floats(0.1, 5.0),
    )
    def place(self, request: str, attempt: int, decode: int, prefill: int | None, tokens: int, lease: float) -> None:
        booked = Reservation(decode, prefill, tokens, 2 * tokens, self.now, self.now + lease, 0)
        self.reservations.reserve(request, attempt, booked)
        self.model[request, attempt] = booked

    @rule(request=st.sampled_from("xyz"), attempt=st.integers(0, 2))
    def release(self, request: str, attempt: int) -> None:
        assert self.reservations.release(request, attempt) == self.model.pop((request, attempt), None)

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        over = [key for key, entry in self.model.items() if entry.expires <= self.now]
        assert self.reservations.expire(self.now) == len(over)
        for key in over:
            del self.model[key]

    @rule(worker=st.sampled_from([D0, D1, P0, P1]))
    def lost(self, worker: int) -> None:
        self.reservations.forget(worker)
        kept = {key: entry for key, entry in self.model.items() if entry.decode != worker}
        self.model = {key: replace(e, prefill=None) if e.prefill == worker else e for key, e in kept.items()}

    @invariant()
    def same_as_the_model(self) -> None:
        assert len(self.reservations) == len(self.model)
        for row in (D0, D1, P0, P1):
            assert booked(self.fleet, row) == expected(self.model, row)


TestBookingsAreTheModel = BookingsAreTheModel.TestCase
TestBookingsAreTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_both_workers_carry_their_part() -> None:
    fleet, reservations = made()
    reservations.reserve("x", 0, reservation())
    assert booked(fleet, D0) == (1, 0, 120)
    assert booked(fleet, P0) == (1, 100, 0)
    reservations.release("x", 0)
    assert booked(fleet, D0) == booked(fleet, P0) == (0, 0, 0)


def test_each_attempt_is_booked_on_its_own_worker() -> None:
    fleet, reservations = made()
    reservations.reserve("x", 0, reservation(D0))
    reservations.reserve("x", 1, reservation(D1))
    reservations.release("x", 0)
    assert (booked(fleet, D0)[0], booked(fleet, D1)[0]) == (0, 1)


def test_a_lost_prefill_worker_leaves_the_work_to_the_decode_worker() -> None:
    fleet, reservations = made()
    reservations.reserve("x", 0, reservation())
    reservations.forget(P0)
    assert booked(fleet, D0) == (1, 100, 120)
    reservations.reserve("y", 0, reservation())  # it is back
    reservations.release("x", 0)
    assert booked(fleet, P0) == (1, 100, 0)


def test_a_queue_is_worked_off_at_the_rate_that_was_measured() -> None:
    fleet, reservations = made()
    fleet.set(P0, prefill_rate=100.0)
    fleet.set(P1, prefill_rate=np.nan)
    for prefill in (P0, P1):
        reservations.reserve("x", prefill, reservation(prefill=prefill, prefill_tokens=200))
    assert reservations.queued(0.0)[[P0, P1]].tolist() == [200, 200]
    assert reservations.queued(1.5)[[P0, P1]].tolist() == [50, 200]
    assert reservations.queued(9.0)[[P0, P1]].tolist() == [0, 200]
    for prefill in (P0, P1):  # the one before is done by now, where that is known
        reservations.reserve("y", prefill, reservation(prefill=prefill, prefill_tokens=300, booked=3.0))
    assert reservations.queued(4.0)[[P0, P1]].tolist() == [200, 500]
    for prefill in (P0, P1):
        reservations.release("y", prefill)
    assert reservations.queued(3.0)[[P0, P1]].tolist() == [200, 200]  # never more than is booked
    for prefill in (P0, P1):
        reservations.release("x", prefill)
    assert reservations.queued(3.0).sum() == 0
