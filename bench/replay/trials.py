"""Deployments tried by short simulations, and what each came to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from rich.console import Console

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.slo import Slo
from bench.replay.simulated import require_room, simulated
from planner.simulator.demand import Trace
from planner.simulator.settings import Settings
from planner.sizing import Deployment, Family, Objectives, Work, alone, fewest, work_of


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. `rate` in requests a second, `cost` an hour (in GPUs, where these have no prices)."""

    cluster: str
    workers: int  # in all
    prefill: int  # of them, that only prefill; 0: all do both
    kind: str  # of the workers, or of those that decode
    prefill_kind: str = ""  # of those that only prefill
    gpus: int  # in all
    cost: float
    rate: float
    attainment: float
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None


class Trials:
    """Of one load and one objective. Raises BenchError for a request that no cache has room for."""

    def __init__(
        self,
        trace: Trace,
        config: LoadConfig,
        settings: Settings,
        slo: Slo,
        wanted: float,
        console: Console | None,
        policy: str = "prefix",
    ) -> None:
        self.tried: dict[tuple[Deployment, float], Trial] = {}
        self._trace, self._config, self._settings = trace, config, settings
        self._slo, self._wanted, self._console, self._policy = slo, wanted, console, policy
        limits = {limit.name: limit.ms / 1e3 for limit in slo.limits}
        within = {name: limits.get(name, math.inf) for name in ("ttft", "tpot", "e2e")}
        self._objectives = Objectives(**within, share=wanted)
        self._endless: dict[Family, Work] = {}  # of a load that goes on for ever

    def work(self, family: Family) -> Work:
        """The least, at the load's own rate."""
        return work_of(self._trace, family, self._objectives)

    def fewest(self, family: Family) -> Deployment:
        """With fewer workers too many requests would be late, at the load's own rate."""
        return fewest(self._trace, family, self._objectives)

    def has_room(self, family: Family) -> bool:
        """Whether caches of both roles hold the longest request."""
        try:
            require_room(self._trace, settings_of(self._settings, family.of(int(family.prefill is not None), 1)))
        except BenchError:
            return False
        return True

    def can(self, family: Family) -> bool:
        """Whether there is room for each request, and enough would be in time if each were alone."""
        return self.has_room(family) and alone(self._trace, family, self._objectives) >= self._wanted

    def capacity(self, deployment: Deployment) -> float:
        """Requests a second that it could do at most, of a load that goes on for ever."""
        family = deployment.family
        if family not in self._endless:
            self._endless[family] = work_of(self._trace, family, Objectives(tpot=self._objectives.tpot))
        work = self._endless[family]
        if family.prefill is None:
            return self._trace.own_rate * deployment.others / work.together
        # Answers of one token are no work for who decodes.
        sides = deployment.prefill / work.prefill, deployment.others / max(1e-9, work.decode)
        return self._trace.own_rate * min(sides)

    def holds(self, deployment: Deployment, rate: float | None = None) -> bool:
        """Whether it keeps to the objectives, at the load's own rate or another one."""
        return self.run(deployment, rate).attainment >= self._wanted

    def best(self, most: int, gpus: int | None) -> Deployment | None:
        """Of those tried at the load's own rate the cheapest that holds, of up to `most` workers and so many GPUs."""
        held = [
            (trial.cost, -trial.attainment, deployment)
            for (deployment, rate), trial in self.tried.items()
            if rate == self._trace.own_rate and trial.attainment >= self._wanted
        ]
        held = [each for each in held if each[2].workers <= most and (gpus is None or each[2].gpus <= gpus)]
        return min(held, key=lambda each: each[:2])[2] if held else None

    def run(self, deployment: Deployment, rate: float | None = None) -> Trial:
        """Simulated once."""
        rate = self._trace.own_rate if rate is None else rate
        key = deployment, rate
        if key not in self.tried:
            self.tried[key] = self._simulated(deployment, rate)
        return self.tried[key]

    def _simulated(self, deployment: Deployment, rate: float) -> Trial:
        trace = self._trace
        if rate != trace.own_rate:
            trace = replace(trace, times=trace.starts(rate))
        family = deployment.family
        summary = simulated(
            trace,
            self._config,
            settings_of(self._settings, deployment),
            policy=self._policy,
            slo=self._slo,
            label=f"simulating {deployment} at {rate:.3g} requests/s",
            console=self._console,
        ).summary
        assert summary.goodput is not None
        return Trial(
            cluster=str(deployment),
            workers=deployment.workers,
            prefill=deployment.prefill,
            kind=str(family.offer),
            prefill_kind=str(family.prefill or ""),
            gpus=deployment.gpus,
            cost=deployment.cost,
            rate=rate,
            attainment=summary.goodput.attainment,
            ttft_p90_ms=summary.ttft_ms.p90,
            tpot_p90_ms=summary.tpot_ms.p90,
        )


def settings_of(settings: Settings, deployment: Deployment) -> Settings:
    """Of a cluster of these workers; what a deployment does not say is as in `settings`."""
    offer = deployment.family.offer
    return replace(
        settings,
        workers=deployment.workers,
        prefill_workers=deployment.prefill,
        timing=offer.timing,
        kv_tokens=offer.kv_tokens,
        max_running=offer.max_running,
        max_batched_tokens=offer.max_batched_tokens,
        gpus=offer.gpus,
        prefill_offer=deployment.family.prefill,
    )


def frontier(trials: Sequence[Trial], worth: Callable[[Trial], float]) -> list[Trial]:
    """Those of which none cheaper, or as cheap, does better: cost against what they are `worth`."""
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda one: (one.cost, -worth(one))):
        if not kept or worth(trial) > worth(kept[-1]):
            kept.append(trial)
    return kept
