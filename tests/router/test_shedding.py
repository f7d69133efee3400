"""Which requests are refused when there are more than all workers can do in time."""

import random

from router.shedding import MOST, Shedding


def refused(shedding: Shedding, priorities: list[int]) -> dict[int, float]:
    """Part of the requests of each priority."""
    counts = {priority: [0, 0] for priority in priorities}
    for priority in priorities:
        counts[priority][0] += 1
        counts[priority][1] += shedding.refuses(priority, 0.0)
    return {priority: part / number for priority, (number, part) in counts.items()}


def test_the_least_urgent_go_first_and_equal_ones_alike() -> None:
    random.seed(1)
    mixed = random.choices((-1, 0, 5), (0.2, 0.5, 0.3), k=4000)
    for share, expected in ((0.1, (0, 0, 1 / 3)), (0.3, (0, 0, 1)), (0.55, (0, 0.5, 1)), (0.9, (0.5, 1, 1))):
        shedding = Shedding()
        refused(shedding, mixed[:300])
        shedding.ask(share, 1.0)
        found = refused(shedding, mixed)
        for priority, part in zip((-1, 0, 5), expected, strict=True):
            assert abs(found[priority] - part) < 0.08, (share, priority)


def test_some_always_come_in_and_all_when_the_time_is_over() -> None:
    shedding = Shedding()
    shedding.ask(1.0, 10.0)
    assert abs(refused(shedding, [0] * 400)[0] - MOST) < 0.01
    assert shedding.share(10.0) == 0.0 == shedding.remaining(11.0) and not shedding.refuses(0, 10.0)


def test_priorities_that_never_come_again_are_forgotten() -> None:
    shedding = Shedding()
    shedding.ask(0.5, 1.0)
    refused(shedding, list(range(2000)))
    assert len(shedding._owed) <= 257
