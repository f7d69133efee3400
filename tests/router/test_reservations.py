"""Booked load, against a list of what is under way."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.reservations import Outstanding, Reservation, Reservations

DECODE = ["d0", "d1"]
PREFILL = ["p0", "p1", None]


def reservation(
    decode: str = "d0",
    prefill: str | None = "p0",
    prefill_tokens: int = 100,
    decode_tokens: int = 120,
    until: float = 10.0,
) -> Reservation:
    return Reservation(decode, prefill, prefill_tokens, decode_tokens, until, 0)


def expected(attempts: dict[tuple[str, int], Reservation], worker: str) -> Outstanding:
    booked = Outstanding()
    for entry in attempts.values():
        if worker in (entry.decode, entry.prefill):
            booked.requests += 1
        if entry.decode == worker:
            booked.decode_tokens += entry.decode_tokens
        if (entry.prefill or entry.decode) == worker:
            booked.prefill_tokens += entry.prefill_tokens
    return booked


class BookingsAreTheModel(RuleBasedStateMachine):
    """Placed, released twice, expired, workers lost and back under the same incarnation."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations()
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
    def place(self, request: str, attempt: int, decode: str, prefill: str | None, tokens: int, lease: float) -> None:
        booked = Reservation(decode, prefill, tokens, 2 * tokens, self.now + lease, 0)
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

    @rule(worker=st.sampled_from(["d0", "d1", "p0", "p1"]))
    def lost(self, worker: str) -> None:
        self.reservations.forget(worker)
        kept = {key: entry for key, entry in self.model.items() if entry.decode != worker}
        self.model = {
            key: Reservation(e.decode, None, e.prefill_tokens, e.decode_tokens, e.expires, 0)
            if e.prefill == worker
            else e
            for key, e in kept.items()
        }

    @invariant()
    def same_as_the_model(self) -> None:
        assert len(self.reservations) == len(self.model)
        for worker in ("d0", "d1", "p0", "p1"):
            assert self.reservations.of(worker) == expected(self.model, worker)


TestBookingsAreTheModel = BookingsAreTheModel.TestCase
TestBookingsAreTheModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_both_workers_carry_their_part() -> None:
    reservations = Reservations()
    reservations.reserve("x", 0, reservation())
    assert reservations.of("d0") == Outstanding(requests=1, prefill_tokens=0, decode_tokens=120)
    assert reservations.of("p0") == Outstanding(requests=1, prefill_tokens=100, decode_tokens=0)
    reservations.release("x", 0)
    assert reservations.of("d0") == reservations.of("p0") == Outstanding()


def test_each_attempt_is_booked_on_its_own_worker() -> None:
    reservations = Reservations()
    reservations.reserve("x", 0, reservation("d0"))
    reservations.reserve("x", 1, reservation("d1"))
    reservations.release("x", 0)
    assert (reservations.of("d0").requests, reservations.of("d1").requests) == (0, 1)


def test_a_lost_prefill_worker_leaves_the_work_to_the_decode_worker() -> None:
    reservations = Reservations()
    reservations.reserve("x", 0, reservation())
    reservations.forget("p0")
    assert reservations.of("d0") == Outstanding(requests=1, prefill_tokens=100, decode_tokens=120)
    reservations.reserve("y", 0, reservation())  # it is back
    reservations.release("x", 0)
    assert reservations.of("p0") == Outstanding(requests=1, prefill_tokens=100)
