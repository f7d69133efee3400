"""The retry budget in simulated time."""

from services.gateway.metrics import GatewayMetrics
from services.gateway.retries import RetryBudget


def drained(budget: RetryBudget, now: float) -> int:
    """Tries that were in it."""
    tries = 0
    while budget.spend(now):
        tries += 1
    return tries


def test_what_is_saved_and_what_time_and_requests_bring() -> None:
    metrics = GatewayMetrics()
    budget = RetryBudget(metrics)
    now = budget._at
    assert drained(budget, now) == 100
    assert drained(budget, now) == 0
    assert drained(budget, now + 2) == 20  # 10 a second
    for _ in range(51):
        budget.earn(now + 2)
    assert drained(budget, now + 2) == 10  # of 51 requests
    for _ in range(500):
        budget.earn(now + 2)
    assert drained(budget, now + 1000) == 100  # of requests long ago nothing is left
    assert metrics.registry.get_sample_value("tandem_retries_total") == 230
    assert metrics.registry.get_sample_value("tandem_retries_refused_total") == 5


def test_a_healthy_stream_of_requests_may_try_one_in_five_again() -> None:
    budget = RetryBudget(GatewayMetrics())
    now = budget._at
    drained(budget, now)
    tries = 0
    for number in range(10_000):
        now += 0.001
        budget.earn(now)
        tries += number % 2 and budget.spend(now)
    assert 0.2 * 10_000 <= tries + 1 <= 0.2 * 10_000 + 10 * 10 + 1
