"""What a replay shows, as numbers and as a table."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.simulator.cluster import Cluster

_COLUMNS = (
    "hit rate, %|of it fetched|to the oracle|TTFT p50|p90|p99, s|TPOT p50|p90, ms|SLO, %"
    "|prompts max/mean|running max/mean"
)


def summarise(cluster: Cluster, *, ttft: float, tpot: float) -> dict[str, Any]:
    """One replay. `ttft` and `tpot`: objectives in seconds. Imbalance: of the worker with most to the mean of all."""
    flights = cluster.flights
    prompt_tokens = np.array([flight.demand.prompt_tokens for flight in flights])
    cached = np.array([flight.cached_tokens for flight in flights])
    first = np.array([flight.first_at - flight.came_at for flight in flights])
    gaps = np.array([max(1, flight.demand.output_tokens - 1) for flight in flights])
    per_token = np.array([flight.ended_at - flight.first_at for flight in flights]) / gaps
    per_token[np.array([flight.demand.output_tokens for flight in flights]) < 2] = 0.0
    computing = [worker for worker in cluster.workers if worker.role != "decode"]
    decoding = [worker for worker in cluster.workers if worker.role != "prefill"]
    seconds = cluster.ended_at
    return {
        "requests": len(flights),
        "hit_rate": float(cached.sum() / prompt_tokens.sum()),
        "fetched_rate": float(sum(flight.fetched_tokens for flight in flights) / prompt_tokens.sum()),
        "restored_rate": {
            tier: sum(flight.restored_by.get(tier, 0) for flight in flights) / int(prompt_tokens.sum())
            for tier in sorted({tier for flight in flights for tier in flight.restored_by})
        },
        "ttft_s": _percentiles(first, 50, 90, 99),
        "tpot_s": _percentiles(per_token, 50, 90, 99),
        "slo_attainment": float(np.mean((first <= ttft) & (per_token <= tpot))),
        "imbalance": {
            "computed_prompt_tokens": _imbalance([worker.computed_tokens for worker in computing]),
            "running": _imbalance([worker.running_seconds for worker in decoding]),
        },
        "preempted": sum(worker.preempted for worker in cluster.workers),
        "fetches": cluster.fetches.ordered,
        "late_fetches": cluster.fetches.late,
        "replayed_events": sum(replica.replays for replica in cluster.replicas),
        "snapshots": sum(replica.snapshots for replica in cluster.replicas),
        "simulated_s": round(seconds, 3),
        "decisions_per_cpu_s": round(len(flights) / cluster.place_seconds),
    }


def without_cpu_time(result: dict[str, Any]) -> dict[str, Any]:
    """What is equal for equal seeds."""
    return {
        name: value
        for name, value in result.items()
        if name not in ("decisions_per_cpu_s", "requests_per_cpu_s", "requests_per_s")
    }


def add_distance(results: list[dict[str, Any]]) -> None:
    """Adds `hit_points_to_oracle` to those whose cluster and rate an oracle had, too."""
    oracles = {_load(result): result["hit_rate"] for result in results if result["policy"] == "oracle"}
    for result in results:
        if (oracle := oracles.get(_load(result))) is not None:
            result["hit_points_to_oracle"] = 100 * (result["hit_rate"] - oracle)


def markdown(results: list[dict[str, Any]]) -> str:
    """A table for each number of workers."""
    lines: list[str] = []
    for workers in sorted({result["workers"] for result in results}):
        columns = ("requests/s a worker", "policy", *_COLUMNS.split("|"))
        lines += ["", f"{workers} workers", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += [_row(result) for result in results if result["workers"] == workers]
    return "\n".join(lines[1:])


def _row(result: dict[str, Any]) -> str:
    distance = result.get("hit_points_to_oracle")
    cells = (
        f"{result['rate']:g}",
        result["policy"],
        f"{100 * result['hit_rate']:.1f}",
        f"{100 * result['fetched_rate']:.1f}",
        "" if distance is None else f"{distance:+.1f}",
        *(f"{result['ttft_s'][name]:.3g}" for name in ("p50", "p90", "p99")),
        *(f"{1e3 * result['tpot_s'][name]:.3g}" for name in ("p50", "p90")),
        f"{100 * result['slo_attainment']:.1f}",
        *(f"{value:.2f}" for value in result["imbalance"].values()),
    )
    return "| " + " | ".join(cells) + " |"


def _load(result: dict[str, Any]) -> tuple[int, float]:
    return result["workers"], result["rate"]


def _imbalance(values: list[float] | list[int]) -> float:
    mean = float(np.mean(values))
    return float(max(values)) / mean if mean else 1.0


def _percentiles(values: NDArray[np.float64], *which: int) -> dict[str, float]:
    return {f"p{each}": float(np.percentile(values, each)) for each in which}
