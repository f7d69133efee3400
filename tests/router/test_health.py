"""Who is left out of decisions, in simulated time, through the placer."""

import itertools
from typing import Any

import numpy as np
import pytest

from router.breaker import FAULTS, LONGEST_PAUSE, PAUSE, PROBE_SECONDS
from router.health import Outcome, Report
from router.placer import Placed, Placer
from router.policy import NoWorker, Way
from router.snapshot import Ask

CHAIN = [bytes([1]) * 16, bytes([2]) * 16]


class Setting:
    """A placer, its workers by name, and attempts that end as told."""

    def __init__(self, *workers: str, policy: str = "prefix") -> None:
        self.placer = Placer(policy=policy, local_prefill_tokens=0, fetch_tokens=0, seed=1)
        self.now = 0.0
        self.rows: dict[str, int] = {}
        self._numbers = itertools.count()
        for name in workers:
            self.rows[name] = self.placer.fleet.join(name)
            self.placer.fleet.set(
                self.rows[name],
                ready=True,
                prefills=name.startswith("p"),
                decodes=not name.startswith("p"),
                aggregated=name.startswith("a"),
                block_size=16,
                layout=self.placer.fleet.layout("l"),
            )

    @property
    def shut(self) -> set[str]:
        return {name for name, row in self.rows.items() if self.placer.fleet.table["shut"][row]}

    def place(self, excluded: tuple[str, ...] = ()) -> tuple[tuple[str, int], Placed]:
        key = (f"r{next(self._numbers)}", 0)
        placed = self.placer.place(key, Ask(64, 8), [("l", CHAIN)], excluded, now=self.now, lease=60)
        return key, placed

    def end(self, attempt: tuple[tuple[str, int], Placed], outcome: Outcome = Outcome.OK, **fields: Any) -> None:
        key, placed = attempt
        self.placer.reservations.release(*key)
        report = Report(key, placed.decision.decode, placed.decision.prefill, outcome, **fields)
        self.placer.health.ended(report, self.now)

    def report(self, decode: str, outcome: Outcome, prefill: str | None = None, **fields: Any) -> None:
        """Of an attempt that was not placed here."""
        row = None if prefill is None else self.rows[prefill]
        key = f"x{next(self._numbers)}"
        self.placer.health.ended(Report(key, self.rows[decode], row, outcome, **fields), self.now)

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        self.now += seconds
        return self.placer.health.judge(self.now)


def test_failing_worker_with_the_best_cache_is_left_out_and_comes_back() -> None:
    setting = Setting("d0", "d1")
    bad = setting.rows["d0"]
    setting.placer.index.replace(bad, CHAIN)
    failed = 0
    for _ in range(50):
        attempt = setting.place()
        if attempt[1].decision.decode == bad:
            failed += 1
            setting.end(attempt, Outcome.WORKER_ERROR)
        else:
            setting.end(attempt)
    assert failed == FAULTS and setting.shut == {"d0"}
    setting.wait(PAUSE)
    assert setting.shut == set()
    probe, other = setting.place(), setting.place()
    assert (probe[1].decision.decode, other[1].decision.decode) == (bad, setting.rows["d1"])
    assert setting.shut == {"d0"}
    setting.end(probe)
    assert setting.shut == set()
    assert setting.place()[1].decision.decode == bad


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.ABORTED, Outcome.UNTOLD])
def test_what_clients_do_opens_nothing(outcome: Outcome) -> None:
    setting = Setting("a0", "a1")
    for _ in range(100):
        setting.report("a0", outcome)
        setting.report("a1", Outcome.OK)
    setting.wait(1)
    assert setting.shut == set()


def test_where_all_fail_one_of_them_is_taken_all_the_same() -> None:
    setting = Setting("a0", "a1")
    for name in ("a0", "a1"):
        for _ in range(FAULTS):
            setting.report(name, Outcome.LOST)
    assert setting.shut == {"a0", "a1"}
    assert setting.place()[1].decision.way is Way.AGGREGATED
    assert setting.place(excluded=("a0",))[1].decision.decode == setting.rows["a1"]
    with pytest.raises(NoWorker):
        setting.place(excluded=("a0", "a1"))


def test_failed_transfers_part_a_pair_and_nobody_else() -> None:
    setting = Setting("p0", "p1", "d0", "d1")
    for _ in range(3 * FAULTS):
        setting.report("d0", Outcome.OK, "p0", prefill_failed=True)
    assert setting.shut == set()
    assert setting.placer.health.apart == {setting.rows["d0"]: {setting.rows["p0"]}}
    seen = set()
    for _ in range(40):
        decision = setting.place()[1].decision
        assert decision.prefill is not None
        seen.add((decision.decode, decision.prefill))
    rows = setting.rows
    assert seen == {(rows["d0"], rows["p1"]), (rows["d1"], rows["p0"]), (rows["d1"], rows["p1"])}


def test_pair_is_joined_again_by_its_probe() -> None:
    setting = Setting("p0", "d0")
    pair = setting.rows["p0"]
    for _ in range(FAULTS):
        setting.end(setting.place(), prefill_failed=True)
    assert setting.place()[1].decision.way is Way.ALONE  # nothing is given to a prefill worker that would not deliver
    setting.wait(PAUSE)
    probe = setting.place()
    assert probe[1].decision.prefill == pair
    assert setting.place()[1].decision.prefill is None
    setting.end(probe)
    assert setting.place()[1].decision.prefill == pair


def test_prefill_worker_that_fails_with_several_is_left_out_for_all() -> None:
    setting = Setting("p0", "p1", "d0", "d1", "d2")
    for number in range(FAULTS):
        setting.report(f"d{number % 2}", Outcome.OK, "p0", prefill_failed=True)
    assert setting.shut == {"p0"}
    assert {setting.place()[1].decision.prefill for _ in range(20)} == {setting.rows["p1"]}


def test_worker_that_stands_still_with_work_is_left_out_until_it_steps() -> None:
    setting = Setting("a0", "a1")
    health, row = setting.placer.health, setting.rows["a0"]
    health.heard(row, running=3, steps=7, now=0.0)
    setting.wait(4.0)
    assert setting.shut == set()
    setting.wait(2.0)
    assert setting.shut == {"a0"} and "without a step" in health.reason(row, setting.now)
    health.heard(row, running=3, steps=8, now=setting.now)
    setting.wait(1.0)
    assert setting.shut == set()
    health.heard(row, running=0, steps=8, now=setting.now)  # idle
    setting.wait(100.0)
    assert setting.shut == set()


def test_nobody_stands_still_when_heartbeats_do_not_come_through() -> None:
    setting = Setting("a0")
    setting.placer.health.heard(setting.rows["a0"], running=1, steps=1, now=0.0)
    setting.placer.health.unheard()
    setting.wait(60.0)
    assert setting.shut == set()


def mixed(setting: Setting, faults: dict[str, float], rounds: int = 40) -> None:
    """Attempts at every worker, of which given shares fail, evenly."""
    for number in range(rounds):
        for name in setting.rows:
            share = faults.get(name, 0.0)
            failed = int((number + 1) * share) > int(number * share)
            setting.report(name, Outcome.WORKER_ERROR if failed else Outcome.OK)


def test_worker_far_worse_than_its_peers_is_ejected_for_longer_each_time() -> None:
    setting = Setting("a0", "a1", "a2", "a3")
    row, outs = setting.rows["a1"], []
    for _ in range(3):
        mixed(setting, {"a1": 0.3})
        assert setting.wait(1.0) == [(row, "faults")]
        assert setting.shut == {"a1"} and "far worse" in setting.placer.health.reason(row, setting.now)
        start = setting.now
        while setting.shut:
            setting.wait(1.0)
        outs.append(setting.now - start)
    assert outs == [30.0, 60.0, 120.0]


def test_what_came_before_the_first_look_counts() -> None:
    setting = Setting("a0", "a1", "a2", "a3")
    setting.now = 1e5
    mixed(setting, {"a1": 0.3})
    assert setting.wait(1.0) == [(setting.rows["a1"], "faults")]


def test_a_fleet_that_is_sick_as_a_whole_has_no_outliers() -> None:
    setting = Setting("a0", "a1", "a2", "a3")
    mixed(setting, dict.fromkeys(setting.rows, 0.3))
    assert setting.wait(1.0) == [] and setting.shut == set()


def test_no_more_than_half_and_never_the_last_one() -> None:
    setting = Setting(*(f"a{number}" for number in range(12)))
    mixed(setting, {"a0": 0.4, "a1": 0.4})
    assert {row for row, _ in setting.wait(1.0)} == {setting.rows["a0"], setting.rows["a1"]}
    alone = Setting("a0")
    mixed(alone, {"a0": 0.4})
    assert alone.wait(1.0) == []
    two = Setting("a0", "a1")
    late = {"a0": 1.0, "a1": 9.0}
    for name, ratio in late.items():
        for _ in range(20):
            two.report(name, Outcome.OK, late=ratio)
    assert two.wait(1.0) == [(two.rows["a1"], "lateness")]
    mixed(two, {"a0": 0.4})
    assert two.wait(1.0) == []


def test_what_is_shut_already_counts_in_the_share() -> None:
    setting = Setting("a0", "a1", "a2", "a3")
    for name in ("a0", "a1"):
        for _ in range(FAULTS):
            setting.report(name, Outcome.LOST)
    for _ in range(40):
        setting.report("a3", Outcome.OK, late=1.0)
        setting.report("a2", Outcome.OK, late=8.0)
    assert setting.wait(1.0) == []


def test_prompts_that_take_far_longer_than_predicted_and_than_at_peers() -> None:
    setting = Setting("p0", "p1", "p2", "d0")
    for _ in range(20):
        for name, late in (("p0", 1.5), ("p1", 8.0), ("p2", 1.2)):
            setting.report("d0", Outcome.OK, name, late=late)
    assert setting.wait(1.0) == [(setting.rows["p1"], "lateness")]


def test_a_worker_that_gets_nothing_is_asked_whether_it_is_alive() -> None:
    setting = Setting("a0", "a1")
    health, row = setting.placer.health, setting.rows["a0"]
    for _ in range(FAULTS):
        setting.report("a0", Outcome.LOST)
    setting.wait(PAUSE)
    assert health.waiting(setting.now) == []
    setting.wait(PROBE_SECONDS)
    assert health.waiting(setting.now) == [row]
    health.checked(row, False, setting.now)
    assert setting.shut == {"a0"}
    setting.wait(2 * PAUSE + PROBE_SECONDS)
    health.checked(row, True, setting.now)
    assert setting.shut == set() and health.waiting(setting.now) == []
    setting.report("a0", Outcome.LOST)
    assert setting.shut == {"a0"}


def test_a_row_is_clean_for_the_next_worker() -> None:
    setting = Setting("p0", "d0", "d1")
    health = setting.placer.health
    for _ in range(FAULTS):
        setting.report("d0", Outcome.OK, "p0", prefill_failed=True)
        setting.report("d0", Outcome.LOST)
    health.heard(setting.rows["d0"], running=1, steps=1, now=0.0)
    assert setting.shut == {"d0"} and health.apart
    setting.placer.leave("d0")
    assert health.apart == {}
    row = setting.placer.fleet.join("d2")
    assert row == setting.rows["d0"]
    setting.wait(60.0)
    assert not setting.placer.fleet.table["shut"][row]
    assert np.array_equal(np.flatnonzero(setting.placer.fleet.table["shut"]), [])


def test_nothing_is_kept_of_faults_long_ago() -> None:
    setting = Setting("p0", "d0", "d1")
    for number in range(1000):
        setting.report(f"d{number % 2}", Outcome.LOST if number % 3 else Outcome.OK, "p0")
        setting.wait(0.001)
    setting.report("d1", Outcome.OK, "p0", prefill_failed=True)
    health = setting.placer.health
    for _ in range(3):
        for row in health.waiting(setting.now):
            health.checked(row, True, setting.now)
        setting.wait(2 * LONGEST_PAUSE)
    assert health.count(setting.now) == {} and health.apart == {} and setting.shut == set()
