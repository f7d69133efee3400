"""What is believed of fetches after some that came and some that did not."""

from services.worker.prefix_costs import PrefixCosts


def test_one_late_fetch_says_nothing_of_other_sources() -> None:
    costs = PrefixCosts()
    costs.late(1.0)
    assert costs.fetch_rate is None
    costs.fetched(1000, 0.5)
    costs.late(1.0)
    assert costs.fetch_rate == 2000


def test_late_ones_in_a_row_do() -> None:
    costs = PrefixCosts()
    costs.late(1.0)
    costs.late(1.0)
    assert costs.fetch_rate == 0
    costs.fetched(1000, 0.5)
    assert 0 < (costs.fetch_rate or 0) < 2000


def test_fetches_that_had_no_time_do_not_slow_down_long_ones() -> None:
    costs = PrefixCosts()
    costs.fetched(8000, 0.1)
    for _ in range(8):
        costs.late(0.01)
    assert costs.fetch_rate == 80_000
