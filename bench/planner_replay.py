"""The planner on recorded traces: `python -m bench.planner_replay --folder DIR [--json FILE]`.

Each trace comes at its own times, warped so that its rate swings as a day does, once over its length. The simulated
cluster has workers of an 8B model on cards up to 12 times as slow as an H200, so that several are needed. Compared
are the smallest fixed cluster that keeps the objectives, a scaler that adds a worker when objectives are missed or
requests wait and removes one when all has been well for five minutes, the planner, and the planner told what will come.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.config import LoadConfig, WorkloadConfig
from bench.replay.planned import planned_trace
from planner.control import Controller, ControlSettings
from planner.decision import Action, Decision
from planner.forecast import Band, Forecast
from planner.offer import Offer
from planner.simulator.autopilot import Autopilot, Decides
from planner.simulator.cluster import Cluster
from planner.simulator.demand import Trace
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from planner.sizing import Family, Objectives, work_of
from planner.window import ROLES, Pools, Role, Window

# To the workload that reads it, and how many times as slow as an H200 the cards are: several are needed then.
TRACES = {
    "azure2023_conv.csv": ("azure", 12.0),
    "azure2023_code.csv": ("azure", 12.0),
    "mooncake_conversation.jsonl": ("mooncake", 1.0),
}
_WELL_SECONDS = 300.0  # until the threshold scaler removes a worker
_SWING = 0.6  # of the rate, up and down


@dataclass(frozen=True)
class Aim:
    """Objectives and how the cluster moves. Times in seconds."""

    ttft: float
    tpot: float
    interval: float
    start: float
    gpus: int


class Fixed:
    """Does nothing."""

    def decide(self, window: Window, pools: Pools, now: float) -> Decision:
        """Nothing."""
        return Decision(number=0, at=now, mode="act", window=window, have=_ready(pools), reason="fixed")


class Threshold:
    """Reacts to what was missed."""

    def __init__(self, aim: Aim) -> None:
        self._aim = aim
        self._well_since = 0.0

    def decide(self, window: Window, pools: Pools, now: float) -> Decision:
        """One worker more or one less."""
        actions: tuple[Action, ...] = ()
        ready, starting = pools.of("aggregated", "ready"), pools.of("aggregated", "starting")
        if window.queued > 0 or window.attained < 0.9:
            self._well_since = now
            if not starting and len(ready) < self._aim.gpus:
                actions = (Action(kind="add", role="aggregated"),)
        elif now - self._well_since >= _WELL_SECONDS and len(ready) > 1 and not starting:
            self._well_since = now
            actions = (Action(kind="remove", role="aggregated", worker=ready[-1].name),)
        return Decision(
            number=0, at=now, mode="act", window=window, have=_ready(pools), actions=actions, reason="threshold"
        )


def _ready(pools: Pools) -> dict[Role, int]:
    return {role: len(pools.of(role, "ready")) for role in ROLES}


class Foresight:
    """A forecaster that knows the trace."""

    def __init__(self, trace: Trace, interval: float) -> None:
        self._trace, self._interval, self._now = trace, interval, 0.0

    def add(self, window: Window) -> None:
        """What time it is."""
        self._now = window.at

    def ahead(self, seconds: float) -> Forecast:
        """The busiest interval until then."""
        times = self._trace.times
        edges = np.arange(self._now, self._now + max(seconds, self._interval) + 1e-6, self._interval)
        counts = np.searchsorted(times, edges[1:]) - np.searchsorted(times, edges[:-1])
        at = int(counts.argmax())
        low, high = np.searchsorted(times, edges[at]), np.searchsorted(times, edges[at + 1])
        chosen = self._trace.demands[int(low) : int(high)] or self._trace.demands
        rate = float(counts[at]) / self._interval
        prompt = float(np.mean([demand.prompt_tokens for demand in chosen]))
        output = float(np.mean([demand.output_tokens for demand in chosen]))
        share = self._trace.endless_hit_rate
        return Forecast(
            at=self._now + seconds,
            arrivals=Band(rate, rate),
            prompt_tokens=Band(prompt, prompt),
            output_tokens=Band(output, output),
            cached_share=Band(share, share),
            method="foresight",
        )


def day_like(trace: Trace) -> Trace:
    """The same requests, whose rate swings by `_SWING` once over the length of the trace."""
    length = float(trace.times[-1])
    grid = np.linspace(0, length, 2001)
    passed = grid - _SWING * length / (2 * np.pi) * (np.cos(2 * np.pi * grid / length) - 1)
    return replace(trace, times=np.interp(trace.times, passed * length / passed[-1], grid))


def slow(times: float) -> Timing:
    """Steps so many times as long as an H200's."""
    usual = msgspec.structs.asdict(Timing())
    parts = ("step", "prompt_token", "prompt_token_context", "sequence", "kept_token")
    return Timing(**(usual | {name: usual[name] * times for name in parts}))


def settings_of(aim: Aim, workers: int, prefill: int, timing: Timing) -> Settings:
    """A cluster that may grow to the budget."""
    return Settings(
        workers=workers, prefill_workers=prefill, slots=aim.gpus, start_seconds=aim.start, timing=timing, seed=1
    )


def replay(trace: Trace, settings: Settings, planner: Decides, aim: Aim) -> dict[str, Any]:
    """One run."""
    began = time.process_time()
    cluster = Cluster(trace, trace.own_rate, "prefix", settings)
    pilot = Autopilot(cluster, planner, interval=aim.interval, gpus=aim.gpus, ttft=aim.ttft, tpot=aim.tpot)
    cluster.run()
    good = sum(flight.ttft <= aim.ttft and flight.tpot <= aim.tpot for flight in cluster.flights)
    return {
        "attainment": good / len(trace.demands),
        "goodput": good / float(trace.times[-1]),
        "gpu_hours": cluster.members.gpu_seconds / 3600,
        "actions": pilot.actions,
        "refused": len(cluster.refused),
        "cpu_s": time.process_time() - began,
    }


def best_ratio(trace: Trace, workers: int, timing: Timing, aim: Aim) -> tuple[int, dict[str, Any]]:
    """How many of so many workers should only prefill, and what comes of it: all are tried, and that all do both."""
    tried = {
        prefill: replay(trace, settings_of(aim, workers, prefill, timing), Fixed(), aim) for prefill in range(workers)
    }
    best = max(tried, key=lambda prefill: float(tried[prefill]["attainment"]))
    return best, tried[best]


def fixed_best(trace: Trace, timing: Timing, aim: Aim) -> tuple[int, int, dict[str, Any]]:
    """The fewest workers, and how many of them only prefill, that keep to the objectives for 90 % of the requests."""
    work = work_of(trace, Family(Offer(timing=timing)), Objectives(tpot=aim.tpot))
    fewest = min(aim.gpus, max(1, int(work.together)))
    for workers in range(fewest, aim.gpus + 1):
        prefill, found = best_ratio(trace, workers, timing, aim)
        if found["attainment"] >= 0.9 or workers == aim.gpus:
            break
    return workers, prefill, found


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the traces lie")
    parser.add_argument("--trace", action="append", choices=list(TRACES), help="one of them; may be given again")
    parser.add_argument("--limit", type=int, default=6000, help="requests of each trace")
    parser.add_argument("--ttft", type=float, default=3.0, help="objective, seconds")
    parser.add_argument("--tpot", type=float, default=0.2, help="objective, seconds")
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--start", type=float, default=60.0, help="seconds until a new worker is ready")
    parser.add_argument("--gpus", type=int, default=16, help="budget")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    aim = Aim(options.ttft, options.tpot, options.interval, options.start, options.gpus)
    found: dict[str, dict[str, Any]] = {}
    print("| trace | planner | goodput, of foresight | attainment, % | GPU-hours, of foresight | actions | refused |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in options.trace or TRACES:
        kind, slower = TRACES[name]
        timing = slow(slower)
        control = ControlSettings(
            mode="act",
            ttft=aim.ttft,
            tpot=aim.tpot,
            offers=(Offer(timing=timing),),
            interval=aim.interval,
            start_seconds=aim.start,
        )
        workload = WorkloadConfig(name=kind, data=str(options.folder / name), limit=options.limit)
        trace = day_like(planned_trace(LoadConfig(url="", workload=workload, arrival="trace", duration=1e9)))
        workers, prefill, fixed = fixed_best(trace, timing, aim)
        first = settings_of(aim, workers, prefill, timing)
        ways: dict[str, Callable[[], tuple[Settings, Decides]]] = {
            "threshold": lambda: (settings_of(aim, workers, 0, timing), Threshold(aim)),  # noqa: B023
            "planner": lambda: (first, Controller(control)),  # noqa: B023
            "foresight": lambda: (first, Controller(control, Foresight(trace, aim.interval))),  # noqa: B023
        }
        rows = {f"fixed {prefill}P{workers - prefill}D" if prefill else f"fixed {workers} aggregated": fixed}
        for way, make in ways.items():
            rows[way] = replay(trace, *make(), aim)
        best = rows["foresight"]
        for way, row in rows.items():
            print(
                f"| {name} | {way} | {row['goodput'] / best['goodput']:.2f} | {100 * row['attainment']:.1f} "
                f"| {row['gpu_hours'] / best['gpu_hours']:.2f} ({row['gpu_hours']:.2f} h) | {row['actions']} "
                f"| {row['refused']} |",
                flush=True,
            )
        found[name] = {"requests": len(trace.demands), "seconds": float(trace.times[-1]), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
