"""The planner over days: `python -m bench.planner_days --folder DIR --trace azure_conv --planner planner --out OUT`.

Each run is one trace under one planner, 24 simulated hours, and writes a file into OUT; `--table OUT` compares what
lies there. Recorded hours are made into days by `bench.replay.day`. Cards are so slow, and objectives so far, that some
tens of thousands of requests a day need several workers: what counts is how the number of workers follows the load.

Planners, as in `bench.planner_replay`: `fixed` (the fewest workers that keep the objectives over the busiest hour, in
the best of all ratios there), `even` (as many workers all day as the planner had in the mean, which is to have run, in
the best ratio over an hour in the morning and the busiest one), `threshold`, `planner`, `foresight` (the planner told
what will come). Trace `constant`: Poisson arrivals of one rate all day. `--plots` draws the table.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.config import LoadConfig, WorkloadConfig
from bench.planner_replay import Aim, Fixed, Foresight, Threshold, best_ratio, fixed_best, settings_of, slow
from bench.replay.day import DAY, bursts, by_the_hour, day_of
from bench.replay.planned import planned_trace
from planner.control import Controller, ControlSettings
from planner.offer import Offer
from planner.simulator.autopilot import Autopilot, Decides
from planner.simulator.cluster import Cluster
from planner.simulator.demand import Demand, Trace
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing

_SWING = 0.6  # of the rate, up and down
_BURSTINESS = 2.0  # coefficient of variation of the gaps of `bursts`
PLANNERS = ("fixed", "even", "threshold", "planner", "foresight")
_UNCHANGING = ("fixed", "even")
_FIRST = 3  # workers at midnight of the others


@dataclass(frozen=True)
class Source:
    """A recording, and what is made of it."""

    file: str
    workload: str
    slower: float  # than an H200
    rate: float = 0.1  # requests a second, the day's mean
    timed: bool = True
    swing: float = _SWING
    length_scale: float = 1.0


SOURCES = {
    "azure_conv": Source("azure2023_conv.csv", "azure", 400.0),
    "azure_code": Source("azure2023_code.csv", "azure", 300.0),
    "mooncake": Source("mooncake_conversation.jsonl", "mooncake", 32.0),
    # In the shape that is published of BurstGPT: gaps of a gamma distribution. Lengths are those of other chats.
    "bursts": Source("sharegpt_updown_lengths.csv", "lengths", 400.0, timed=False, length_scale=3.0),
    "constant": Source("azure2023_conv.csv", "azure", 400.0, timed=False, swing=0.0),
}


def a_day(name: str, folder: Path, rate: float, seed: int) -> Trace:
    """24 hours from midnight on."""
    source = SOURCES[name]
    workload = WorkloadConfig(name=source.workload, data=str(folder / source.file), length_scale=source.length_scale)
    if source.timed:
        hour = planned_trace(LoadConfig(url="", workload=workload, arrival="trace", duration=1e9))
        return day_of(hour, rate=rate, share=source.swing, seed=seed)
    lengths = planned_trace(LoadConfig(url="", workload=workload, arrival="poisson", rate=1.0, num_requests=2000))
    variation = _BURSTINESS if source.swing else 1.0
    return bursts(lengths, rate=rate, share=source.swing, variation=variation, seed=seed)


def hours_around(trace: Trace, *hours: float) -> Trace:
    """The hours around these of the day, one after the other."""
    demands, times = list[Demand](), list[float]()
    for number, hour in enumerate(hours):
        inside = np.flatnonzero(np.abs(trace.times - 3600 * hour) <= 1800)
        demands += [trace.demands[at] for at in inside.tolist()]
        times += (trace.times[inside] - 3600 * (hour - 0.5 - number)).tolist()
    return replace(trace, demands=demands, times=np.array(times) - times[0])


def unchanging(trace: Trace, planner: str, timing: Timing, aim: Aim, had: float) -> tuple[int, int]:
    """Workers, and how many only prefill, of `fixed` or `even`. `had`: workers that the planner had in the mean."""
    if planner == "fixed":
        return fixed_best(hours_around(trace, 12), timing, aim)[:2]
    workers = math.ceil(had)
    return workers, best_ratio(hours_around(trace, 6, 12), workers, timing, aim)[0]


def run(trace: Trace, planner: str, timing: Timing, aim: Aim, policy: str, had: float) -> dict[str, Any]:
    """One day, requests placed by a router's `policy`. `had`: of `unchanging`."""
    control = ControlSettings(
        mode="act",
        ttft=aim.ttft,
        tpot=aim.tpot,
        offers=(Offer(timing=timing),),
        interval=aim.interval,
        start_seconds=aim.start,
    )
    workers, prefill = _FIRST, 0
    if planner in _UNCHANGING:
        workers, prefill = unchanging(trace, planner, timing, aim, had)
    deciders: dict[str, Callable[[], Decides]] = {
        **dict.fromkeys(_UNCHANGING, Fixed),
        "threshold": lambda: Threshold(aim),
        "planner": lambda: Controller(control),
        "foresight": lambda: Controller(control, Foresight(trace, aim.interval)),
    }
    settings: Settings = settings_of(aim, workers, prefill, timing)
    cluster = Cluster(trace, trace.own_rate, policy, settings)
    pilot = Autopilot(cluster, deciders[planner](), interval=aim.interval, gpus=aim.gpus, ttft=aim.ttft, tpot=aim.tpot)
    cluster.run()
    good = np.array([flight.ttft <= aim.ttft and flight.tpot <= aim.tpot for flight in cluster.flights], np.float64)
    came = np.array([flight.came_at for flight in cluster.flights])
    at = np.array([decision.at for decision in pilot.decisions])
    there = np.array([sum(decision.have.values()) + sum(decision.coming.values()) for decision in pilot.decisions])
    acted = [decision.at / 3600 for decision in pilot.decisions for _ in decision.actions]
    kinds = [action.kind for decision in pilot.decisions for action in decision.actions]
    return {
        "planner": planner,
        "requests": len(trace.demands),
        "seconds": float(trace.times[-1]),
        "deployment": f"{prefill}P{workers - prefill}D" if prefill else f"{workers} aggregated",
        "attainment": float(good.sum()) / len(trace.demands),
        "gpu_hours": cluster.members.gpu_seconds / 3600,
        "actions": pilot.actions,
        "by_kind": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "acted_at_hours": [round(hour, 2) for hour in acted],
        "refused": len(cluster.refused),
        "attainment_by_hour": [round(share, 3) for share in by_the_hour(came, good, DAY)],
        "workers_by_hour": [round(mean, 2) for mean in by_the_hour(at, there.astype(np.float64), DAY)],
    }


def table(folder: Path) -> None:
    """All that lies there, in Markdown."""
    print("| trace | planner | attainment, % | goodput, of foresight | GPU-hours | of foresight | actions |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in SOURCES:
        rows = _rows(folder, name)
        best = rows.get("foresight")
        for way, row in rows.items():
            told = f"{way} {row['deployment']}" if way in _UNCHANGING else way
            good = f"{row['attainment'] / best['attainment']:.2f}" if best else "-"
            cost = f"{row['gpu_hours'] / best['gpu_hours']:.2f}" if best else "-"
            print(
                f"| {name} | {told} | {100 * row['attainment']:.1f} | {good} "
                f"| {row['gpu_hours']:.1f} | {cost} | {row['actions']} |"
            )


def _rows(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    return {way: json.loads(at.read_text()) for way in PLANNERS if (at := folder / f"{name}-{way}.json").is_file()}


def plots(folder: Path, into: Path) -> None:
    """Attainment and workers over each day, and attainment against GPU-hours, as SVG."""
    from matplotlib import rc_context

    from bench.report.style import CYCLE, STYLE, panels

    colours = dict(zip(PLANNERS, CYCLE, strict=False))
    names = [name for name in SOURCES if _rows(folder, name)]
    with rc_context(STYLE | {"svg.hashsalt": "days"}):
        over, axes = panels(2, len(names), 2.6 * len(names), sharex=True)
        against, places = panels(len(names), 1, 3.4, sharey=True)
        for at, name in enumerate(names):
            shares, workers = axes[2 * at : 2 * at + 2]
            for way, row in _rows(folder, name).items():
                hours = np.arange(DAY / 3600) + 0.5
                shares.plot(hours, 100 * np.array(row["attainment_by_hour"]), color=colours[way], label=way)
                workers.plot(hours, row["workers_by_hour"], color=colours[way], label=way)
                places[at].scatter(row["gpu_hours"], 100 * row["attainment"], color=colours[way], label=way)
            shares.set(title=f"{name}: in time, %", ylim=(0, 105))
            workers.set(title=f"{name}: workers", ylim=(0, None), xticks=range(0, 25, 4))
            places[at].set(title=name, xlabel="GPU-hours", xlim=(0, 1.15 * places[at].dataLim.x1))
        places[0].set(ylabel="in time, %")
        axes[0].legend(loc="lower left", ncols=3)
        places[0].legend(loc="lower left")
        for axis in axes[-2:]:
            axis.set(xlabel="hour of the day")
        over.savefig(into / "planner-days-hours.svg", metadata={"Date": None})
        against.savefig(into / "planner-days-cost.svg", metadata={"Date": None})


def main() -> None:
    """One run, or the table of those that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the traces lie")
    parser.add_argument("--trace", choices=list(SOURCES))
    parser.add_argument("--planner", choices=PLANNERS)
    parser.add_argument("--out", type=Path, help="folder that the run's file is written to")
    parser.add_argument("--table", type=Path, metavar="OUT", help="compare what lies there, and run nothing")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="with --table: draw it, too")
    parser.add_argument("--rate", type=float, help="requests a second, the day's mean  [default: the trace's]")
    parser.add_argument("--policy", default="prefix", help="of the router")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=50.0, help="objective, seconds")
    parser.add_argument("--tpot", type=float, default=6.4, help="objective, seconds")
    parser.add_argument("--interval", type=float, default=240.0)
    parser.add_argument("--start", type=float, default=240.0, help="seconds until a new worker is ready")
    parser.add_argument("--gpus", type=int, default=16, help="budget")
    options = parser.parse_args()
    if options.table is not None:
        table(options.table)
        if options.plots is not None:
            plots(options.table, options.plots)
        return
    if None in (options.folder, options.trace, options.planner, options.out):
        parser.error("give --folder, --trace, --planner and --out, or --table")
    source = SOURCES[options.trace]
    trace = a_day(options.trace, options.folder, options.rate or source.rate, options.seed)
    aim = Aim(options.ttft, options.tpot, options.interval, options.start, options.gpus)
    planned, had = options.out / f"{options.trace}-planner.json", 0.0
    if options.planner == "even":
        if not planned.is_file():
            parser.error(f"{planned} is missing: run --planner planner first")
        had = json.loads(planned.read_text())["gpu_hours"] * 3600 / DAY
    row = run(trace, options.planner, slow(source.slower), aim, options.policy, had)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.trace}-{options.planner}.json").write_text(json.dumps(row) + "\n")
    print(f"{options.trace} {options.planner}: {100 * row['attainment']:.1f} %, {row['gpu_hours']:.1f} h")


if __name__ == "__main__":
    main()
