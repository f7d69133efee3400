"""Decisions: what is seen to what is done. Names of cases are those of reports about other planners."""

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from planner.control import Controller, ControlSettings
from planner.decision import Action, Decision, from_line, to_line
from planner.offer import Offer
from planner.simulator.timing import Timing
from planner.starts import Starts
from planner.window import Pools, Role, Window, Worker

EVERY = 30.0


def settings(**changed: object) -> ControlSettings:
    plain = ControlSettings(
        mode="act", ttft=1.0, tpot=0.02, start_seconds=60.0, shrink_cool_down=120.0, flip_cool_down=60.0
    )
    return msgspec.structs.replace(plain, **changed)


def window(at: float, rate: float, prompt: float = 2000, output: float = 200, **more: float) -> Window:
    means = {"prompt_tokens": prompt, "cached_tokens": 0.0, "output_tokens": output} if rate else {}
    return Window(at=at, seconds=EVERY, arrivals=rate * EVERY, **(means | {"queued": 0.0} | more))


@dataclass
class Fleet:
    """Workers that do at once what a decision says, except that they start for a minute, and a few never do."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    gpus: int = 16
    minimum: dict[Role, int] = field(default_factory=dict)
    fixed: tuple[Role, ...] = ()
    workers: list[Worker] = field(default_factory=list)
    now: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        for role in ("prefill", "decode", "aggregated"):
            for _ in range(getattr(self, role)):
                self.add(role, "ready")

    def add(self, role: Role, state: str = "starting", **more: object) -> None:
        self.made += 1
        made = Worker(name=f"w{self.made}", role=role, state=state, since=self.now, **more)  # type: ignore[arg-type]
        self.workers.append(made)

    @property
    def pools(self) -> Pools:
        return Pools(workers=tuple(self.workers), gpus=self.gpus, minimum=self.minimum, fixed=self.fixed)

    def count(self, role: Role | None = None) -> int:
        return sum(role in (None, worker.role) for worker in self.workers)

    def tick(self, controller: Controller, seen: Window) -> Decision:
        self.now = seen.at
        self.workers = [
            msgspec.structs.replace(each, state="ready", since=self.now)
            if each.state == "starting" and self.now - each.since >= 60 and not each.name.startswith("lame")
            else each
            for each in self.workers
        ]
        decision = controller.decide(seen, self.pools, seen.at)
        assert from_line(to_line(decision)).actions == decision.actions
        for action in decision.actions:
            self.do(action)
        assert sum(worker.gpus for worker in self.workers) <= self.gpus
        return decision

    def do(self, action: Action) -> None:
        if action.kind == "add":
            self.add(action.role or "decode", gpus=action.gpus)
        elif action.kind == "remove":
            self.workers = [each for each in self.workers if each.name != action.worker]
        elif action.kind == "flip":
            self.workers = [
                msgspec.structs.replace(each, role=action.role, since=self.now) if each.name == action.worker else each
                for each in self.workers
            ]

    def run(self, controller: Controller, ticks: int, rate: float, **of: float) -> list[Decision]:
        return [self.tick(controller, window(self.now + EVERY, rate, **of)) for _ in range(ticks)]


def test_b241_no_traffic_goes_to_the_minimum_and_lengths_are_carried_over() -> None:
    fleet, controller = Fleet(decode=4, prefill=4, minimum={"prefill": 1, "decode": 1}), Controller(settings())
    fleet.run(controller, 4, 60.0)
    before = fleet.count()
    last = fleet.run(controller, 30, 0.0)[-1]
    assert before > 2 and (fleet.count("prefill"), fleet.count("decode")) == (1, 1)
    assert last.forecast.prompt_tokens.mean == 2000 and last.forecast.output_tokens.mean == 200


def test_from_and_to_zero() -> None:
    fleet, controller = Fleet(minimum={"decode": 0}), Controller(settings())
    assert not fleet.run(controller, 3, 0.0)[-1].actions
    fleet.run(controller, 60, 1.0)
    assert fleet.count() >= 1
    fleet.run(controller, 19, 0.0)
    assert fleet.count() >= 1
    fleet.run(controller, 2, 0.0)  # ten minutes, whatever is forecast
    assert fleet.count() == 0
    fleet.tick(controller, Window(at=fleet.now + EVERY, seconds=EVERY, arrivals=0.0, queued=3.0))
    assert fleet.count() >= 1  # they have come before the window, and wait


def test_some_worker_that_answers_stays_where_zero_is_not_asked_for() -> None:
    fleet, controller = Fleet(prefill=2, decode=2), Controller(settings())
    fleet.run(controller, 3, 1.0)
    fleet.run(controller, 60, 0.0)
    assert fleet.count("decode") + fleet.count("aggregated") == 1


def test_what_was_shed_is_over_where_nothing_is_carried_out() -> None:
    fleet, controller = Fleet(aggregated=1, gpus=1), Controller(settings(roles=("aggregated",)))
    decisions = fleet.run(controller, 8, 200.0, queued=500.0, attained=0.1)
    assert decisions[-1].shed > 0
    advising = Controller(settings(roles=("aggregated",), mode="advise"))
    advising.restore(decisions)
    assert fleet.tick(advising, Window(at=fleet.now + EVERY, seconds=EVERY)).shed == 0
    assert not advising._shed


def test_b242_without_metrics_the_minimum_is_kept_and_nothing_else_changes() -> None:
    fleet, controller = Fleet(prefill=1, decode=3, minimum={"prefill": 2, "decode": 1}), Controller(settings())
    blind = Window(at=30.0, seconds=EVERY)
    decision = fleet.tick(controller, blind)
    assert [str(action) for action in decision.actions] == ["add one prefill worker"]
    assert "arrivals were not measured" in decision.reason
    again = fleet.tick(controller, msgspec.structs.replace(blind, at=60.0))
    assert not again.actions and again.held == "arrivals were not measured"


def test_b243_demand_above_capacity_is_seen_at_once() -> None:
    fleet, controller = Fleet(prefill=1, decode=1), Controller(settings())
    fleet.run(controller, 3, 8.0)
    assert fleet.count() == 2
    fleet.run(controller, 2, 60.0, attained=0.1)
    assert fleet.count() >= 4


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf, -1.0])
def test_b244_odd_values_raise_nothing_and_change_nothing(odd: float) -> None:
    names = [name for name in Window.__struct_fields__ if name not in ("at", "seconds")]
    fleet, controller = Fleet(prefill=1, decode=1, minimum={"prefill": 1, "decode": 1}), Controller(settings())
    for tick in range(5):
        decision = fleet.tick(controller, Window(at=EVERY * tick, seconds=EVERY, **dict.fromkeys(names, odd)))
        assert not decision.actions
    fleet.run(controller, 3, 5.0)
    for name in names:
        seen = msgspec.structs.replace(window(fleet.now + EVERY, 5.0), **{name: odd})
        assert not fleet.tick(controller, seen).actions, name


@pytest.mark.parametrize("wrong", [{"ttft": 0.0}, {"tpot": math.nan}, {"attainment": 1.0}, {"offers": ()}])
def test_b248_a_target_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ControlSettings(**({"ttft": 1.0, "tpot": 0.02} | wrong))  # type: ignore[arg-type]


def test_b251_workers_that_never_get_ready_go_first() -> None:
    fleet = Fleet(aggregated=2)
    fleet.workers.append(Worker(name="lame", role="aggregated", state="starting", since=-1000.0))
    controller = Controller(settings(roles=("aggregated",), shrink_cool_down=0.0))
    first, second = fleet.run(controller, 2, 0.5)
    assert str(first.actions[0]) == "remove lame (aggregated)"
    assert fleet.count() == 1 and not fleet.run(controller, 1, 0.5)[0].actions
    assert len(first.actions) + len(second.actions) == 2


def test_b254_a_tick_uses_one_whole_configuration() -> None:
    fleet, controller = Fleet(prefill=2, decode=2), Controller(settings())
    one, other = settings(model="one", mode="advise"), settings(model="other", mode="off")
    for tick in range(50):
        controller.settings = one if tick % 2 else other
        decision = controller.decide(window(EVERY * tick, 5.0), fleet.pools, EVERY * tick)
        assert (decision.model, decision.mode) in (("one", "advise"), ("other", "off"))


def test_a_shift_from_prompts_to_answers_flips_before_it_adds() -> None:
    fleet = Fleet(prefill=4, decode=2, gpus=6)
    controller = Controller(settings(roles=("prefill", "decode")))
    fleet.run(controller, 10, 25.0, prompt=6000, output=30)
    assert fleet.count("prefill") >= 4
    decisions = fleet.run(controller, 10, 50.0, prompt=300, output=900)
    kinds = [action.kind for decision in decisions for action in decision.actions]
    assert kinds[0] == kinds[1] == "flip" and "add" not in kinds and fleet.count("decode") >= 3


def test_where_nobody_starts_workers_only_their_roles_change() -> None:
    fleet, controller = Fleet(prefill=2, decode=2), Controller(settings(scales=False, roles=("prefill", "decode")))
    done: list[str] = []
    loads = {"prompts": (10.0, 8000, 20), "answers": (60.0, 100, 500), "few": (0.01, 100, 10)}
    shares = {}
    for name, (rate, prompt, output) in loads.items():
        for _ in range(20):
            seen = window(fleet.now + EVERY, rate, prompt, output)
            done += [action.kind for action in fleet.tick(controller, seen).actions]
            assert fleet.count() == 4
        shares[name] = fleet.count("prefill")
    assert shares == {"prompts": 3, "answers": 1, "few": 1}
    assert done == ["flip"] * 3


def test_roles_follow_a_load_that_swings_again_and_again() -> None:
    """They change within a decision, so what comes after a worker's start is not what they go by."""
    changed = settings(scales=False, roles=("prefill", "decode"), flip_cool_down=0.0, start_seconds=12 * EVERY)
    fleet, controller = Fleet(prefill=2, decode=2), Controller(changed)
    for _ in range(3):
        for prefill, (rate, prompt, output) in ((3, (10.0, 8000, 20)), (1, (12.0, 100, 2500))):
            for _ in range(15):
                fleet.tick(controller, window(fleet.now + EVERY, rate, prompt, output))
            assert fleet.count("prefill") == prefill


def test_constant_load_changes_nothing_once_it_is_served() -> None:
    fleet, controller = Fleet(prefill=1, decode=1), Controller(settings())
    fleet.run(controller, 20, 33.0, attained=0.95)
    later = fleet.run(controller, 200, 33.0, attained=0.95)
    assert not [action for decision in later for action in decision.actions]


def test_a_constant_load_of_chance_arrivals_changes_nothing_after_an_hour() -> None:
    """Counts vary although the rate does not."""
    fleet, controller, acted = Fleet(aggregated=1), Controller(settings(roles=("aggregated",))), []
    for count in np.random.default_rng(4).poisson(40, 300).tolist():
        decision = fleet.tick(controller, window(fleet.now + EVERY, count / EVERY, prompt=16_000))
        acted += [decision.at] * len(decision.actions)
    assert fleet.count() > 1 and max(acted) < 3600, acted


def test_who_waits_by_chance_is_no_more_load() -> None:
    """Arrivals by chance queue at any load. What cannot begin within the objective is more, as is what is late."""
    timing = msgspec.structs.replace(Timing(), prompt_step=0.0, prompt_token=0.01, prompt_token_context=0.0)
    slow = Offer(timing=timing, max_batched_tokens=4096)  # 20 s a prompt of 2,000 tokens
    controller = Controller(settings(offers=(slow,), roles=("aggregated",), ttft=82.0, tpot=30.0))
    fleet = Fleet(aggregated=4)
    fleet.run(controller, 60, 0.1, output=20, attained=1.0)
    begin = fleet.count() * (82 - 20 - 2) / 20  # requests that wait and are in time

    def told(queued: float, attained: float) -> float:
        seen = window(fleet.now + EVERY, 0.1, output=20, queued=queued, attained=attained)
        return float(controller.decide(seen, fleet.pools, seen.at).reason.split()[0])

    usual = told(0.0, 1.0)
    assert told(begin, 1.0) == usual
    assert told(begin + 6, 1.0) == pytest.approx(usual + 6 / 60, abs=0.01)
    assert told(begin, 0.5) == pytest.approx(usual + begin / 60, abs=0.01)


def test_a_rare_burst_is_late_where_workers_for_it_would_cost_more() -> None:
    """One window in 40 brings five times as much: a tenth of all requests, as many as may be late."""
    fleet, controller = Fleet(aggregated=1, gpus=32), Controller(settings(roles=("aggregated",)))
    calm = Fleet(aggregated=1, gpus=32)
    calm.run(Controller(settings(roles=("aggregated",))), 20, 8.0)
    rates = [40.0 if number % 40 == 20 else 8.0 for number in range(100)]
    counts = [(fleet.tick(controller, window(fleet.now + EVERY, rate)), fleet.count())[1] for rate in rates]
    assert np.mean(counts[50:]) <= calm.count() + 1


def test_slow_starts_are_waited_for_longer_each_time() -> None:
    """Workers take a minute, and were said to take two seconds."""
    fleet, controller = Fleet(aggregated=1), Controller(settings(roles=("aggregated",), start_seconds=2.0))
    decisions = fleet.run(controller, 30, 60.0)
    assert "remove" in [action.kind for decision in decisions for action in decision.actions]
    assert fleet.count() > 1 and not [action for decision in decisions[15:] for action in decision.actions]


def test_a_worker_that_told_how_long_it_took_gives_others_as_long() -> None:
    fleet, controller = Fleet(aggregated=1), Controller(settings(roles=("aggregated",), start_seconds=2.0))
    fleet.workers = [msgspec.structs.replace(fleet.workers[0], start_seconds=60.0)]
    decisions = fleet.run(controller, 6, 60.0)  # three minutes
    kinds = [action.kind for decision in decisions for action in decision.actions]
    assert fleet.count() > 1 and set(kinds) == {"add"}


def test_a_start_that_was_seen_is_known_from_then_on_and_after_a_restart() -> None:
    """From the asking to the last look before it was there: no longer than it took."""
    fleet, controller = Fleet(aggregated=1), Controller(settings(roles=("aggregated",), start_seconds=20.0))
    decisions = fleet.run(controller, 30, 60.0)
    assert math.isnan(decisions[0].start_seconds) and 30.0 <= decisions[-1].start_seconds <= 60.0
    assert controller.start_seconds == decisions[-1].start_seconds
    after = Controller(settings(roles=("aggregated",), start_seconds=2.0))
    after.restore([from_line(to_line(decision)) for decision in decisions])
    fleet.workers = fleet.workers[:1]  # all others were lost
    again = fleet.run(after, 10, 60.0)
    assert "remove" not in [action.kind for decision in again for action in decision.actions] and fleet.count() > 1


def test_a_worker_that_comes_under_another_name_was_the_one_that_started() -> None:
    """Replicas of a deployment have no names before they are there."""
    starts = Starts()
    there = Worker(name="decode-a", role="decode")
    starts.see([there, Worker(name="decode#0", role="decode", state="starting", since=0.0)], 40.0)
    starts.see([there, Worker(name="prefill-a", role="prefill"), Worker(name="decode-b", role="decode")], 70.0)
    assert starts.seen == 40.0
    starts.see([there], 100.0)
    starts.see([there, Worker(name="decode-c", role="decode")], 130.0)  # nobody was seen to ask for it
    assert starts.seen == 40.0


def test_workers_of_several_cards_are_counted_by_them_and_not_replaced_for_it() -> None:
    """Two prefill workers on two cards each, while what can be had is said to have one."""
    fleet, controller = Fleet(decode=1, gpus=8), Controller(settings(roles=("prefill", "decode")))
    for _ in range(2):
        fleet.add("prefill", "ready", gpus=2)
    kinds = [action.kind for decision in fleet.run(controller, 10, 60.0) for action in decision.actions]
    assert "remove" not in kinds and fleet.pools.used_gpus == 8
    assert {worker.gpus for worker in fleet.workers if worker.role == "prefill"} == {2}


def test_a_restart_goes_on_with_numbers_and_cool_downs() -> None:
    fleet, controller = Fleet(prefill=1, decode=1), Controller(settings(shrink_cool_down=600.0))
    decisions = fleet.run(controller, 8, 60.0)
    assert fleet.count() > 2
    after = Controller(settings(shrink_cool_down=600.0))
    after.restore([from_line(to_line(decision)) for decision in decisions])
    later = fleet.run(after, 8, 1.0)
    assert later[0].number == 9 and not any(decision.actions for decision in later)
    assert "within 600 s" in later[-1].held


def test_nothing_goes_before_the_load_is_known() -> None:
    fleet, controller = Fleet(aggregated=4), Controller(settings())
    first = fleet.run(controller, 4, 1.0)  # the first decision, and two minutes after it
    assert not any(decision.actions for decision in first) and "within 120 s" in first[-1].held
    fleet.run(controller, 20, 1.0)
    assert fleet.count() == 1


def test_roles_do_not_change_while_there_are_too_few_workers() -> None:
    """Else those that change, or are removed for others that start, are missing where they are needed most."""
    fleet, controller = Fleet(aggregated=2), Controller(settings())
    fleet.run(controller, 3, 20.0)
    actions = [action for decision in fleet.run(controller, 6, 60.0, queued=30.0) for action in decision.actions]
    assert actions and {(action.kind, action.role) for action in actions} == {("add", "aggregated")}


def test_lateness_after_a_queue_is_no_load() -> None:
    fleet, controller = Fleet(aggregated=4), Controller(settings())
    fleet.run(controller, 2, 20.0, attained=1.0)
    fleet.run(controller, 2, 20.0, queued=50.0, attained=0.1)
    after = fleet.run(controller, 3, 20.0, attained=0.1)
    assert after[-1].corrections["load"] <= 1.0


def test_what_the_operator_fixed_stays() -> None:
    fleet, controller = (
        Fleet(prefill=2, decode=1, fixed=("prefill",)),
        Controller(settings(roles=("prefill", "decode"))),
    )
    fleet.workers[-1] = msgspec.structs.replace(fleet.workers[-1], fixed=True)
    fleet.run(controller, 6, 60.0)
    assert fleet.count("prefill") == 2 and fleet.count("decode") > 1
    fleet.run(controller, 60, 0.0)
    assert fleet.count("prefill") == 2 and [each.name for each in fleet.workers if each.role == "decode"] == ["w3"]


def test_when_all_gpus_do_not_suffice_the_rest_is_shed_and_taken_again() -> None:
    fleet, controller = Fleet(prefill=1, decode=1, gpus=2), Controller(settings())
    assert [each.shed for each in fleet.run(controller, 3, 200.0, attained=1.0)] == [0.0] * 3  # nobody is late
    late = fleet.run(controller, 3, 200.0, attained=0.1)
    assert {action.kind for decision in late for action in decision.actions} == {"shed"}
    assert 0 < late[-1].shed <= 0.9 and str(late[0].actions[0]) == f"shed {100 * late[0].shed:.0f} % of the arrivals"
    kept = fleet.run(controller, 3, 200.0, attained=1.0)  # those that come in are in time now
    assert [each.shed for each in kept] == [late[-1].shed] * 3 and not any(each.actions for each in kept)
    again = Controller(settings())
    again.restore(late)
    assert (
        again.decide(window(0.0, math.nan), fleet.pools, 0.0).shed == late[-1].shed
    )  # what is unknown changes nothing
    back = fleet.run(controller, 12, 2.0)
    shares = [late[-1].shed, *(decision.shed for decision in back)]
    assert shares == sorted(shares, reverse=True) and not any(shares[2:])
    assert "shed nothing any more" in [str(action) for decision in back for action in decision.actions]


def test_only_as_much_is_shed_as_is_too_much() -> None:
    def shed(rate: float) -> float:
        fleet, controller = Fleet(prefill=1, decode=1, gpus=2), Controller(settings())
        return fleet.run(controller, 4, rate, attained=0.5)[-1].shed

    shares = [shed(rate) for rate in (2.0, 20.0, 40.0, 80.0, 160.0)]
    assert shares == sorted(shares) and shares[0] == 0.0
    served = [rate * (1 - share) for rate, share in zip((40.0, 80.0, 160.0), shares[2:], strict=True) if share]
    assert len(served) >= 2 and max(served) < 1.5 * min(served)


def test_advice_changes_nothing_that_later_advice_goes_by() -> None:
    fleet, controller = Fleet(prefill=1, decode=1), Controller(settings(mode="advise"))
    decisions = [controller.decide(window(EVERY * tick, 60.0), fleet.pools, EVERY * tick) for tick in range(4)]
    assert decisions[0].actions == decisions[3].actions != ()


def test_of_two_sizes_of_workers_the_one_that_keeps_to_the_objective() -> None:
    from planner.offer import Offer
    from planner.simulator.timing import Timing

    one = Timing()
    four = msgspec.structs.replace(one, step=one.step / 3, prompt_token=one.prompt_token / 3.5)
    offers = (Offer(timing=one), Offer(gpus=4, timing=four, kv_tokens=3_200_000))
    fleet, controller = Fleet(gpus=16), Controller(settings(tpot=0.003, offers=offers))
    chosen = fleet.run(controller, 3, 5.0)[-1].chosen
    assert chosen is not None and chosen.tensor_parallel == 4 and chosen.attainment >= 0.9
