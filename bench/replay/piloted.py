"""The planner over a simulated cluster: its own code decides how many workers of which role there are."""

from dataclasses import dataclass, replace

from bench.errors import BenchError
from bench.measure.record import Record
from bench.measure.slo import Slo
from bench.measure.summary_format import Planner
from bench.options import between
from planner.control import Controller, ControlSettings
from planner.decision import Mode
from planner.simulator.autopilot import Autopilot
from planner.simulator.cluster import Cluster
from planner.simulator.settings import Settings

_LONGEST = 1e7  # seconds
_MOST_FAILURES = 360.0  # of a worker in an hour: one that fails more often gets no long prompt done


@dataclass(frozen=True)
class Piloting:
    """What flags say. Times in seconds."""

    mode: Mode = "off"
    max_workers: int = 0  # 0: twice as many as there are at first
    interval: float = 30.0
    start: float = 120.0  # until a new worker, or one that failed, is ready
    failures: float = 0.0  # of a worker, in an hour

    def apply_to(self, settings: Settings) -> Settings:
        """Raises BenchError."""
        between(self.interval, "--interval", 1.0, _LONGEST)
        between(self.start, "--start", 0.0, _LONGEST)
        if self.failures:
            between(self.failures, "--failures", 1e-6, _MOST_FAILURES)
        if self.max_workers and self.max_workers < settings.workers:
            raise BenchError(f"--max-workers {self.max_workers} is less than the {settings.workers} that there are")
        slots = (self.max_workers or 2 * settings.workers) if self.mode == "act" else 0
        return replace(settings, slots=slots, start_seconds=self.start, failures=self.failures)

    def pilot(self, cluster: Cluster, slo: Slo | None) -> Autopilot | None:
        """Looks on, and acts where it is to. None: nobody does. Raises BenchError without objectives."""
        if self.mode == "off":
            return None
        limits = {limit.name: limit.ms / 1e3 for limit in slo.limits} if slo is not None else {}
        if not {"ttft", "tpot"} <= limits.keys():
            raise BenchError("--planner keeps to objectives: give --slo ttft=...,tpot=..., such as ttft=1s,tpot=50ms")
        settings = cluster.settings
        control = ControlSettings(
            mode=self.mode,
            ttft=limits["ttft"],
            tpot=limits["tpot"],
            offers=(settings.offer("aggregated"),),
            interval=self.interval,
            flip_seconds=settings.flip_seconds,
            start_seconds=settings.start_seconds,
        )
        return Autopilot(
            cluster,
            Controller(control),
            interval=self.interval,
            gpus=settings.slots or settings.workers,
            ttft=limits["ttft"],
            tpot=limits["tpot"],
        )


NO_PLANNER = Piloting()


def told(autopilot: Autopilot, cluster: Cluster, mode: Mode) -> Planner:
    """What the planner did, for the summary."""
    acted = [action.kind for each in autopilot.decisions if each.mode == "act" for action in each.actions]
    return Planner(
        mode=mode,
        decisions=len(autopilot.decisions),
        actions=len(acted),
        advised=sum(len(each.actions) for each in autopilot.decisions if each.mode == "advise"),
        by_kind={kind: acted.count(kind) for kind in sorted(set(acted))},
        worker_hours=cluster.members.gpu_seconds / 3600,
        failures=cluster.members.failures,
    )


def refused(cluster: Cluster, starts: list[float], warmup: int) -> list[Record]:
    """Requests that were shed, as a client would have seen them."""
    return [
        Record(
            id=number,
            conversation=number,
            warmup=number < warmup,
            scheduled=starts[number],
            sent=starts[number],
            end=starts[number],
            status=429,
            error="http_429",
            detail="shed by the planner",
        )
        for number in cluster.refused
    ]
