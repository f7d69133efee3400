"""Circuit breakers in simulated time."""

from router.breaker import FAULTS, LONGEST_PAUSE, PAUSE, PROBE_SECONDS, WINDOW, Breaker, BreakerState


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for number in range(FAULTS):
        assert breaker.passes(at)
        breaker.failed(number, at)
    assert breaker.state(at) is BreakerState.OPEN
    return breaker


def test_faults_in_a_row_open_it_and_one_probe_at_a_time_may_close_it() -> None:
    breaker = opened()
    assert not breaker.passes(PAUSE - 0.1)
    assert breaker.passes(PAUSE) and breaker.state(PAUSE) is BreakerState.HALF_OPEN
    breaker.sent("probe", PAUSE)
    assert not breaker.passes(PAUSE)
    breaker.succeeded("sent before it opened", PAUSE)
    breaker.failed("sent before it opened", PAUSE)
    assert breaker.state(PAUSE) is BreakerState.HALF_OPEN and not breaker.passes(PAUSE)
    breaker.succeeded("probe", PAUSE + 1)
    assert breaker.state(PAUSE + 1) is BreakerState.CLOSED and breaker.passes(PAUSE + 1)


def test_pause_grows_with_each_probe_that_fails_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for number in range(2000):
        pauses.append(breaker.half_open_at - now)
        now = breaker.half_open_at
        breaker.sent(number, now)
        breaker.failed(number, now)
    assert pauses[:3] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE


def test_a_worker_that_fails_soon_after_it_came_back_is_out_for_longer() -> None:
    breaker = opened()
    breaker.sent("probe", PAUSE)
    breaker.succeeded("probe", PAUSE)
    for number in range(FAULTS):
        breaker.failed(number, PAUSE + 1)
    assert breaker.half_open_at == PAUSE + 1 + 2 * PAUSE


def test_few_or_rare_or_old_faults_do_not_open_it() -> None:
    breaker = Breaker()
    for number in range(100):  # one in three
        breaker.failed(number, number * 0.01)
        breaker.succeeded(-number, number * 0.01)
        breaker.succeeded(-number, number * 0.01)
        assert breaker.passes(number * 0.01)
    breaker = Breaker()
    for number in range(100):
        breaker.failed(number, number * (WINDOW / (FAULTS - 1) + 0.1))
    assert breaker.state(1e6) is BreakerState.CLOSED


def test_most_attempts_fail_between_some_that_do_not() -> None:
    breaker = Breaker()
    for number in range(FAULTS):
        breaker.succeeded(-number, 0.0)
        breaker.failed(number, 0.0)
    assert not breaker.passes(0.0)


def test_what_says_nothing_leaves_the_place_of_the_probe_to_the_next() -> None:
    breaker = opened()
    breaker.sent("left", PAUSE)
    breaker.ended("left")
    assert breaker.passes(PAUSE)
    breaker.sent("never heard of again", PAUSE)
    assert not breaker.passes(PAUSE + PROBE_SECONDS - 0.1)
    assert breaker.passes(PAUSE + PROBE_SECONDS)


def test_a_check_closes_it_on_trial() -> None:
    breaker = opened()
    assert not breaker.is_waiting(PAUSE + PROBE_SECONDS - 0.1)
    now = PAUSE + PROBE_SECONDS
    assert breaker.is_waiting(now)
    breaker.checked(False, now)
    assert not breaker.passes(now) and not breaker.is_waiting(now)
    now = breaker.half_open_at + PROBE_SECONDS
    breaker.checked(True, now)
    assert breaker.state(now) is BreakerState.CLOSED
    breaker.failed("the first one", now)
    assert breaker.state(now) is BreakerState.OPEN


def test_witnesses() -> None:
    breaker = Breaker(witnesses=2)
    for number in range(3 * FAULTS):
        breaker.failed(number, 0.0, "one peer")
    assert breaker.passes(0.0)
    breaker.failed("x", 0.0, "another")
    assert not breaker.passes(0.0)


def test_it_is_forgotten_when_it_has_been_quiet_for_long() -> None:
    assert Breaker().is_idle(0.0)
    breaker = opened()
    assert not breaker.is_idle(1e6)
    breaker.sent("probe", PAUSE)
    breaker.succeeded("probe", PAUSE)
    assert not breaker.is_idle(PAUSE + 1) and breaker.is_idle(PAUSE + LONGEST_PAUSE)
