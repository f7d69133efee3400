"""The planner's decisions: from what is seen to what is done, and why. No I/O, no clock.

Workers are added as soon as the forecast's upper end needs them, and go when none of the latest decisions needed them
and fewer would do with a margin. Between numbers that would do, the roles stay as they are. A window whose arrivals
were not measured changes nothing, except that the minimum is kept.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from planner.decision import Action, Decision, Mode, Option
from planner.forecast import Band, Forecaster
from planner.forecast.windows import Picking
from planner.offer import Offer
from planner.performance import Corrections, Load
from planner.reconcile import reconcile
from planner.starts import Starts
from planner.weighing import Bounds, Choice, Counts, Weighed, choose
from planner.window import ROLES, Pools, Role, Window, Worker, measured
from router.saturation import BUSY_SECONDS

_MOST_MARGIN = 0.25  # of load, with which fewer workers must still do, however few requests come
_LONGEST_START = 1800.0  # seconds for which a worker that starts is waited for, at the most
_NEVER = float("-inf")
_MOST_SHED = 18  # twentieths of the arrivals
_SHED_STAYS = 0.1  # share of the arrivals by which what is shed must be wrong to change, but to none


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner aims at, and how fast it may move. Times in seconds. Raises ValueError for what cannot be."""

    model: str = ""
    mode: Mode = "advise"
    ttft: float  # objective
    tpot: float  # objective
    attainment: float = 0.9  # share of requests that are to keep to both
    offers: tuple[Offer, ...] = (Offer(),)
    roles: tuple[Role, ...] = ROLES  # that may be used
    scales: bool = True  # somebody starts and ends workers; if not, all that there are have some role
    interval: float = 30.0  # between two decisions
    flip_seconds: float = 10.0  # that a flip takes
    start_seconds: float = 180.0  # that a worker takes until it is ready, at the least
    shrink_cool_down: float = 300.0  # for how long fewer workers must have been enough; and after any change
    flip_cool_down: float = 120.0  # after a flip, until the next one
    shrink_margin: float = 0.05  # of load, with which fewer workers must still do, at the least
    max_step: int = 4  # workers flipped, added or removed by one decision
    idle_seconds: float = 600.0  # without arrivals, until the last workers go, if a minimum of 0 is given
    drain_seconds: float = 60.0  # in which requests that wait are to be served

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "interval", "drain_seconds"):
            if not (measured(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} {value:g} must be above 0 seconds")
        if not 0 < self.attainment < 1:
            raise ValueError(f"attainment {self.attainment:g} must be above 0 and below 1")
        if not self.offers or self.max_step < 1 or not self.roles:
            raise ValueError("there must be an offer of workers, a role, and a max_step of at least 1")


class Controller:
    """Of one model. `settings` may be exchanged between decisions. Restored from its own decisions after a restart."""

    def __init__(self, settings: ControlSettings, forecaster: Forecaster | None = None) -> None:
        self.settings = settings
        self._forecaster: Forecaster = forecaster or Picking()
        self._corrections = Corrections()
        self._number = 0
        self._changed_at = self._flipped_at = _NEVER
        self._demand_at = _NEVER  # something came or waited
        self._queued_at = _NEVER  # something waited
        self._shed = 0.0
        self._waits = 1.0  # times as long as it should take a worker to start is waited for it
        self._starts = Starts()
        self._needed: deque[tuple[float, int]] = deque(maxlen=10_000)  # when, GPUs
        self._steady = False  # the last decision found all in order

    def restore(self, decisions: Sequence[Decision]) -> None:
        """Goes on where these ended: numbers, history, corrections, cool-downs."""
        for decision in decisions:
            self._forecaster.add(decision.window)
            self._note(decision)
        if decisions:
            self._corrections = Corrections(**decisions[-1].corrections)
            self._starts.restore(decisions[-1].start_seconds)

    def decide(self, window: Window, pools: Pools, now: float) -> Decision:
        """What to do at `now` (unix seconds). Never raises for odd values: then it holds and says why."""
        settings = self.settings  # one whole configuration, whatever it is changed to meanwhile
        self._forecaster.add(window)
        self._starts.see(pools.workers, now)
        if settings.mode != "act":
            self._shed = 0.0  # nobody sees to it
        draft = Decision(
            number=self._number + 1,
            at=now,
            model=settings.model,
            mode=settings.mode,
            window=window,
            # Until the next decision has had its effect.
            forecast=self._forecaster.ahead(
                (self.start_seconds if settings.scales else settings.flip_seconds) + settings.interval
            ),
            have={role: len(pools.of(role, "ready")) for role in ROLES},
            coming={role: len(pools.of(role, "starting")) for role in ROLES},
            shed=self._shed,
            reason="the planner is off",
        )
        if settings.mode != "off":
            if self._demand_at == _NEVER:
                self._demand_at = self._changed_at = now  # too little is known yet for anything to go
            self._learn(settings, window, pools)
            draft = _Tick(settings, draft, pools, self).decided()
            self._wait_longer(settings, draft, pools)
        corrections = msgspec.structs.asdict(self._corrections)
        decision = msgspec.structs.replace(draft, corrections=corrections, start_seconds=self._starts.seen)
        self._note(decision)
        return decision

    @property
    def start_seconds(self) -> float:
        """That a worker takes to start: as it is set, or longer, as the latest took longer."""
        return max(self.settings.start_seconds, self._starts.least)

    @property
    def patience(self) -> float:
        """Seconds after which a worker that still starts is taken to fail."""
        return min(max(_LONGEST_START, 2 * self.start_seconds), self._waits * 2 * self.start_seconds)

    def _wait_longer(self, settings: ControlSettings, decision: Decision, pools: Pools) -> None:
        """After each that was given up: perhaps they start, but more slowly than they were said to."""
        late = {
            each.name for each in pools.workers if each.state == "starting" and decision.at - each.since > self.patience
        }
        if settings.mode == "act" and any(each.kind == "remove" and each.worker in late for each in decision.actions):
            self._waits *= 2

    def _learn(self, settings: ControlSettings, window: Window, pools: Pools) -> None:
        self._corrections.learn(_present(settings, pools), window)
        # What ends soon after requests waited is late for that reason, and no sign of more load than is seen.
        calm = not window.queued > 0 and window.at - self._queued_at >= 4 * settings.interval
        # Of what is shed the arrivals tell, but nothing that is measured.
        if self._steady and calm and not self._shed and all(each.state == "ready" for each in pools.workers):
            predicted = self._predicted(settings, window, pools)
            if predicted is not None:
                self._corrections.learn_load(predicted, window.attained)

    def _predicted(self, settings: ControlSettings, window: Window, pools: Pools) -> float | None:
        """What the model says of the workers that there are and of what came to them. None: that was not measured."""
        lengths = window.prompt_tokens, window.output_tokens
        if not window.arrivals > 0 or not all(measured(value) and value > 0 for value in lengths):
            return None
        cached = 1 - window.computed_tokens / window.prompt_tokens
        load = Load(
            rate=window.rate * self._corrections.load,
            prompt_tokens=window.prompt_tokens,
            output_tokens=window.output_tokens,
            cached_share=min(0.99, max(0.0, cached)),
        )
        have = [len(pools.of(role, "ready")) for role in ROLES]
        offer = _present(settings, pools)
        weighed = Weighed(offer, load, settings.ttft, settings.tpot, max(1, sum(have)), self._corrections)
        return weighed.option(*have).attainment

    def _note(self, decision: Decision) -> None:
        """What later decisions need of this one."""
        self._number = max(self._number, decision.number)
        if not (decision.window.arrivals == 0 and decision.window.queued == 0):  # or nobody knows
            self._demand_at = decision.at
        if decision.window.queued > 0:
            self._queued_at = decision.window.at
        if decision.needed:
            self._needed.append((decision.at, decision.needed))
        self._steady = decision.chosen is not None and not decision.actions
        if decision.mode != "act":
            return
        self._shed = decision.shed
        for action in decision.actions:
            if action.kind == "shed":
                continue
            self._changed_at = decision.at
            if action.kind == "flip":
                self._flipped_at = decision.at


@dataclass(frozen=True, slots=True)
class _Tick:
    """One decision: the settings, what is seen, and what is remembered."""

    settings: ControlSettings
    draft: Decision
    pools: Pools
    memory: Controller

    def decided(self) -> Decision:
        draft, pools = self.draft, self.pools
        load = self._load()
        if load is None:
            return self._unknown()
        have, bounds = self._have(), self._bounds()
        idle = draft.at - self.memory._demand_at
        none_needed = not any(low for low, _ in bounds.values())
        # A forecast of what came long ago need not be 0.
        ends = idle >= self.settings.idle_seconds and bool(pools.minimum)  # zero is asked for
        if none_needed and (ends if any(have) else not load.rate):
            target = Option(note="nothing comes", tensor_parallel=_present(self.settings, pools).gpus)
            actions = self._reconciled(target, removals=len(pools.workers))
            reason = f"nothing has come for {idle:.0f} s" if any(have) else "nothing comes, and there is no worker"
            return self._with(options=(target,), chosen=target, actions=actions, shed=0.0, reason=reason)
        choice = self._choose(load)
        if choice is None:
            return self._with(reason="no deployment is within roles, numbers and GPUs", held="nothing is allowed")
        return self._towards(choice, load)

    def _load(self) -> Load | None:
        """What is to be served. None: it is not known."""
        settings, window, far = self.settings, self.draft.window, self.draft.forecast
        near = self.memory._forecaster.ahead(settings.interval)
        # The busier one of what comes at once and what comes when a worker that is added now is ready.
        likely = [likely for band in (near.arrivals, far.arrivals) if (likely := _likely(band))]
        if not measured(window.arrivals) or not likely:
            return None
        rates = max(likely, key=fmean)
        rate = fmean(rates)
        spread = tuple(value / rate for value in rates) if rate else (1.0,)
        rate *= self.memory._corrections.load
        lengths = far.prompt_tokens.mean, far.output_tokens.mean
        share = far.cached_share.mean if measured(far.cached_share.mean) else 0.0
        prompt, output = (max(1.0, value) if measured(value) else 1.0 for value in lengths)
        cached = min(0.99, share)
        load = Load(rate=rate, prompt_tokens=prompt, output_tokens=output, cached_share=cached, spread=spread)
        load = msgspec.structs.replace(load, rate=rate + self._behind(load) / settings.drain_seconds)
        return None if load.rate and not all(map(measured, lengths)) else load

    def _behind(self, load: Load) -> float:
        """Requests that wait although chance does not explain it.

        Arrivals by chance queue at any load, and the model counts with that: of what waits only so much is work left
        over as cannot begin within the objective, on the workers that there are. Where answers are late, or nobody
        knows, all of it is, as what is short may be something else than time for prompts.
        """
        window, settings, offer = self.draft.window, self.settings, _present(self.settings, self.pools)
        if not measured(window.queued):
            return 0.0
        if not window.attained >= settings.attainment:
            return window.queued
        prompt = round(load.prompt_tokens)
        alone = offer.timing.prompt(round(prompt * load.cached_share), prompt, offer.max_batched_tokens)
        seconds = max(1e-9, alone * self.memory._corrections.prompt)
        prefills = len(self.pools.of("prefill", "ready")) + len(self.pools.of("aggregated", "ready"))
        # Routers hold requests back when workers have a while's prompts before them.
        begins = prefills * max(0.0, settings.ttft - seconds - BUSY_SECONDS) / seconds
        return max(0.0, window.queued - begins)

    def _unknown(self) -> Decision:
        """Without knowing the load: not below the minimum, and something for those who wait."""
        window, have, settings = self.draft.window, self._have(), self.settings
        wanted: dict[Role, int] = {
            role: max(low, count) for (role, (low, _)), count in zip(self._bounds().items(), have, strict=True)
        }
        why = "arrivals were not measured"
        if measured(window.arrivals):
            why = "the lengths of requests are not known yet"
            if not any(wanted.values()) and (window.arrivals > 0 or window.queued > 0):
                apart = {"prefill", "decode"} <= set(settings.roles)
                wanted |= {"prefill": 1, "decode": 1} if apart else {"aggregated": 1}
        size = _present(settings, self.pools).gpus
        target = Option(**wanted, tensor_parallel=size, gpus=size * sum(wanted.values()), note="the least")
        actions = self._reconciled(target)
        if not actions:
            return self._with(reason=f"holds: {why}", held=why)
        return self._with(options=(target,), actions=actions, reason=f"{why}, but {target} is the least")

    def _towards(self, choice: Choice, load: Load) -> Decision:
        settings, current, smallest = self.settings, choice.current, choice.smallest
        told = f"{load.rate:.2f} requests/s of {load.prompt_tokens:.0f} + {load.output_tokens:.0f} tokens"
        keeps = f"{current} keeps {_percent(current)}"
        target, held = smallest, ""
        if smallest.attainment < settings.attainment:
            reason = f"{told}: more than the GPUs can do in time; {smallest} keeps most, {_percent(smallest)}"
        elif any(current.count(role) < low for role, (low, _) in self._bounds().items()):
            reason = f"{told}: {current} is less than there must be"
        elif current.attainment >= settings.attainment:
            target, held = self._fewer(choice, load)
            reason = f"{told}: {keeps}" + (f", and so does {target}" if target is not current else "")
        else:
            reason = f"{told}: {keeps} only, {smallest} {_percent(smallest)}"
        if settings.scales:
            target = self._bounded(choice, target)
        else:
            target, reason = self._all_used(choice, load), f"{told}: {keeps}"
            reason += "" if target is current else f", {target} {_percent(target)}"
        flips = settings.max_step if self._since(self.memory._flipped_at) >= settings.flip_cool_down else 0
        actions = self._reconciled(target, flips=flips, removals=settings.max_step)
        if not flips and not held and _other_roles(target, current):
            held = f"a worker changed its role within the last {settings.flip_cool_down:.0f} s"
        shed = self._shed_share(smallest, load)
        if shed != self.memory._shed:
            actions.append(Action(kind="shed", share=shed))
        return self._with(
            options=choice.options,
            chosen=target,
            needed=smallest.gpus,
            actions=actions,
            shed=shed,
            reason=reason,
            held=held,
        )

    def _all_used(self, choice: Choice, load: Load) -> Option:
        """Of all workers that there are. Roles change where that lets clearly more of what comes be in time.

        How much can be in time is what tells deployments apart: far above it each is late with nearly everything.
        """
        current, have, wanted = choice.current, self._have(), self.settings.attainment
        if current.attainment >= wanted:
            return current

        def without(twentieths: int) -> tuple[Option | None, Option]:
            """The best roles, and those there are, for what is left of the load."""
            part = self._choose(msgspec.structs.replace(load, rate=load.rate * (1 - twentieths / 20)))
            if part is None:
                return None, current
            return part.weighed.best(sum(have), self._bounds(), part.family), part.current

        def holds(option: Option | None) -> bool:
            return option is not None and option.attainment >= wanted

        least = bisect_left(range(_MOST_SHED), True, key=lambda each: holds(without(each)[0]))
        best = without(least)[0]
        as_it_is = without(min(_MOST_SHED, least + round(20 * _SHED_STAYS)))[1]
        if best is None or not holds(best) or holds(as_it_is) or sum(map(best.count, ROLES)) != sum(have):
            return current
        return choice.weighed.option(*map(best.count, ROLES))

    def _fewer(self, choice: Choice, load: Load) -> tuple[Option, str]:
        """Where what there is holds: fewer workers, or why not.

        Each of N - 1 workers gets N / (N - 1) of what it has: they must do with that, and a margin, all the time. The
        fewer requests come, the more chance is in what is known of their rate, and the larger is the margin: a standard
        deviation of their number within the cool-down.
        """
        settings, current, smallest = self.settings, choice.current, choice.smallest
        margin = max(
            settings.shrink_margin, min(_MOST_MARGIN, 1 / math.sqrt(max(1.0, load.rate * settings.shrink_cool_down)))
        )
        if smallest.gpus >= current.gpus:
            return current, ""
        raised = msgspec.structs.replace(load, rate=load.rate * (1 + margin))
        again = self._choose(raised)
        if again is None or again.smallest.gpus >= current.gpus:
            return current, f"{smallest} would do, but not with {100 * margin:.0f} % more load"
        since = self.draft.at - settings.shrink_cool_down
        lately = max((gpus for at, gpus in self.memory._needed if at >= since), default=0)
        if self.memory._changed_at > since:
            return current, f"{smallest} would do, but workers changed within {settings.shrink_cool_down:.0f} s"
        if lately >= current.gpus:
            return (
                current,
                f"{smallest} would do, but {lately} GPUs were needed within {settings.shrink_cool_down:.0f} s",
            )
        if lately <= again.smallest.gpus:
            return again.smallest, ""
        between = again.weighed.best(lately // again.smallest.tensor_parallel, self._bounds(), again.family)
        return (between, "") if between and between.attainment >= settings.attainment else (again.smallest, "")

    def _bounded(self, choice: Choice, target: Option) -> Option:
        """A target that is more than a step away is approached by the best there is on the way."""
        have, size = sum(self._have()), target.tensor_parallel
        number = target.gpus // size
        step = min(max(number, have - self.settings.max_step), have + self.settings.max_step)
        if step == number or size != choice.current.tensor_parallel or not have:
            return target
        return choice.weighed.best(step, self._bounds(), choice.family) or target

    def _shed_share(self, smallest: Option, load: Load) -> float:
        """Part of the arrivals without which the rest is in time, in twentieths.

        None unless all GPUs are at work and do not suffice. As what is aimed at lies above what mostly comes, it begins
        only where requests are late or wait, and goes by what comes now.
        """
        settings, window, before = self.settings, self.draft.window, self.memory._shed
        full = self.pools.used_gpus + smallest.tensor_parallel > self.pools.gpus
        late = window.attained < settings.attainment or window.queued > 0
        if smallest.attainment >= settings.attainment or not full or not (before or late):
            return 0.0
        arrivals = self.memory._forecaster.ahead(settings.interval).arrivals.mean
        rate = max((each for each in (window.rate, arrivals) if measured(each)), default=load.rate)
        rate = min(load.rate, rate + (window.queued / settings.drain_seconds if measured(window.queued) else 0.0))
        share = bisect_left(range(_MOST_SHED), True, key=lambda each: self._holds(load, rate * (1 - each / 20))) / 20
        return before if share and abs(share - before) <= _SHED_STAYS else share

    def _holds(self, load: Load, rate: float) -> bool:
        choice = self._choose(msgspec.structs.replace(load, rate=rate))
        return choice is not None and choice.smallest.attainment >= self.settings.attainment

    def _choose(self, load: Load) -> Choice | None:
        settings = self.settings
        return choose(
            settings.offers,
            _present(settings, self.pools),
            load,
            self._have(),
            self._bounds(),
            ttft=settings.ttft,
            tpot=settings.tpot,
            wanted=settings.attainment,
            gpus=self.pools.gpus,
            corrections=self.memory._corrections,
        )

    def _reconciled(self, target: Option, *, flips: int = 0, removals: int = 0) -> list[Action]:
        additions = self.settings.max_step
        if not self.settings.scales:
            removals = additions = 0
        return reconcile(
            target,
            self.pools,
            self._never_ready(),
            [offer.gpus for offer in self.settings.offers],
            flips=flips,
            removals=removals,
            additions=additions,
        )

    def _never_ready(self) -> list[Worker]:
        patience = self.memory.patience
        return [one for one in self.pools.workers if one.state == "starting" and self._since(one.since) > patience]

    def _have(self) -> Counts:
        """Workers that serve, or will."""
        failed = self._never_ready()
        prefill, decode, aggregated = (
            sum(worker not in failed for worker in self.pools.of(role, "starting", "ready")) for role in ROLES
        )
        return prefill, decode, aggregated

    def _bounds(self) -> Bounds:
        """By role: the operator's, and what the budget allows. A role that is not used may still have a minimum."""
        pools, bounds = self.pools, dict[Role, tuple[int, int]]()
        for role, count in zip(ROLES, self._have(), strict=True):
            low = max(pools.minimum.get(role, 0), sum(worker.fixed for worker in pools.of(role, "starting", "ready")))
            high = pools.maximum.get(role, pools.gpus) if role in self.settings.roles else low
            bounds[role] = (count, count) if role in pools.fixed else (low, max(low, high))
        return bounds

    def _since(self, when: float) -> float:
        return self.draft.at - when

    def _with(self, *, actions: Sequence[Action] = (), **changes: Any) -> Decision:
        return msgspec.structs.replace(self.draft, actions=tuple(actions), **changes)


def _likely(band: Band) -> tuple[float, ...]:
    """Equally likely rates. (): nothing is known."""
    return tuple(value for value in band.spread or (band.upper,) if measured(value))


def _present(settings: ControlSettings, pools: Pools) -> Offer:
    """The offer that most workers are of; the first one if there are none."""
    sizes = [worker.gpus for worker in pools.workers]
    return max(settings.offers, key=lambda offer: sizes.count(offer.gpus))


def _percent(option: Option) -> str:
    return f"{100 * option.attainment:.1f} %"


def _other_roles(target: Option, current: Option) -> bool:
    """Some role has too many workers while another has too few."""
    off = [target.count(role) - current.count(role) for role in ROLES]
    return min(off) < 0 < max(off)
