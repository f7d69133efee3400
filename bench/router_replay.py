"""Replays a trace against the router's own code with mock workers: `python -m bench.router_replay --trace T --json F`.

The whole runs on a simulated clock in one process. Routers are `router.placer.Placer`, told of KV events, loads and
ends with the delays of a network; workers have the engine's KV pool and order of prompts, and steps that take as long
as those of an 8B Llama shape on an H200 (`planner.simulator.timing`). Blocks have 512 tokens, as in Mooncake's traces.
`oracle` is a policy that sees all caches and queues at once and delays first tokens least.

A rate is in requests per second and worker, so that ladders of clusters of different size compare. The trace is
replayed faster or slower for it, which brings the turns of a conversation nearer to each other, too, or takes them
apart. Hit rates count what was fetched from other workers; the table says how much. Equal seeds give equal results.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.errors import BenchError
from bench.provenance import report
from bench.replay.report import add_distance, markdown, summarise
from bench.replay.traces import GENERATED, TRACES_VARIABLE, load_trace
from planner.simulator.cluster import ORACLE, Cluster
from planner.simulator.demand import Trace
from planner.simulator.settings import Settings
from router.policies import POLICIES


def replay(
    trace: Trace, rate: float, policy: str, settings: Settings, *, ttft: float, tpot: float, progress: Progress
) -> dict[str, Any]:
    """One replay at `rate` requests per second and worker. Raises BenchError if a request can never fit."""
    check_fits(trace, settings)
    cluster = Cluster(trace, rate * settings.workers, policy, settings)
    task = progress.add_task(f"{settings.workers} workers, {rate:g}/s each, {policy}", total=len(trace.demands))
    wall, cpu = time.perf_counter(), time.thread_time()
    cluster.run(lambda: progress.advance(task))
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    progress.remove_task(task)
    return {
        "workers": settings.workers,
        "rate": rate,
        "policy": policy,
        **summarise(cluster, ttft=ttft, tpot=tpot),
        "requests_per_s": round(len(trace.demands) / wall),
        "requests_per_cpu_s": round(len(trace.demands) / cpu),
    }


def check_fits(trace: Trace, settings: Settings) -> None:
    """Raises BenchError if a request of the trace is larger than a worker's KV pool."""
    most = max(demand.prompt_tokens + demand.output_tokens for demand in trace.demands)
    if most + 2 * settings.max_running >= settings.kv_tokens:
        raise BenchError(
            f"a request of {trace.name} has {most} tokens, too many for a pool of {settings.kv_tokens}: "
            "raise --kv-tokens"
        )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", default="tool_agent", help=f"{', '.join(GENERATED)} (generated), a file, or a name in --folder"
    )
    parser.add_argument("--folder", help=f"where traces lie as NAME.jsonl; otherwise {TRACES_VARIABLE} says it")
    parser.add_argument("--requests", type=int, default=0, help="the first so many of the trace; 0: all")
    parser.add_argument("--workers", default="16", help="numbers of workers, like 4,16,64")
    parser.add_argument(
        "--prefill-share", type=float, default=0.0, help="of the workers, that only prefill; the rest decodes. 0: none"
    )
    parser.add_argument("--rates", default="0.5,1,1.5,2", help="requests per second and worker")
    parser.add_argument(
        "--policies", default="all", help=f"of {', '.join(POLICIES)} and {ORACLE}, or all (the default)"
    )
    parser.add_argument("--routers", type=int, default=1, help="replicas, each with a part of the requests")
    parser.add_argument("--no-shared-load", action="store_true", help="replicas tell each other nothing")
    parser.add_argument("--kv-tokens", type=int, default=Settings.kv_tokens, help="of each worker's pool")
    parser.add_argument("--fetch-tokens", type=int, default=Settings.fetch_tokens, help="0: no prefix is fetched")
    parser.add_argument("--event-delay", type=float, default=1e3 * Settings.event_delay, help="ms, of KV events")
    parser.add_argument("--lost-events", type=float, default=0.0, help="share of messages that a router misses")
    parser.add_argument("--ttft", type=float, default=2.0, help="objective, seconds")
    parser.add_argument("--tpot", type=float, default=50.0, help="objective, ms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the report, after each replay")
    return parser


def main() -> None:
    """The command: a table in Markdown, and the JSON."""
    parser = _parser()
    arguments = parser.parse_args()
    policies = [*POLICIES, ORACLE] if arguments.policies == "all" else arguments.policies.split(",")
    if unknown := set(policies) - {*POLICIES, ORACLE}:
        parser.error(f"no policy {min(unknown)!r}; there are {', '.join([*POLICIES, ORACLE])}")
    settings = Settings(
        routers=arguments.routers,
        shared_load=not arguments.no_shared_load,
        kv_tokens=arguments.kv_tokens,
        fetch_tokens=arguments.fetch_tokens,
        event_delay=arguments.event_delay / 1e3,
        lost_events=arguments.lost_events,
        seed=arguments.seed,
    )
    try:
        trace = load_trace(arguments.trace, arguments.folder, limit=arguments.requests, seed=arguments.seed)
        results = []
        with Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        ) as progress:
            for workers in map(int, arguments.workers.split(",")):
                share = round(arguments.prefill_share * workers)
                for rate in _numbers(arguments.rates):
                    for policy in policies:
                        cluster = replace(settings, workers=workers, prefill_workers=share)
                        objectives = {"ttft": arguments.ttft, "tpot": arguments.tpot / 1e3}
                        results.append(replay(trace, rate, policy, cluster, **objectives, progress=progress))
                        add_distance(results)
                        if arguments.json is not None:
                            _write(arguments.json, trace, results)
    except BenchError as error:
        parser.error(str(error))
    print(
        f"{trace.name}: {len(trace.demands)} requests, {trace.own_rate:.2f} a second by its own times; "
        f"an endless cache would hold {100 * trace.endless_hit_rate:.1f} % of the prompts' tokens\n"
    )
    print(markdown(results))


def _write(path: Path, trace: Trace, results: list[dict[str, Any]]) -> None:
    """What was found so far."""
    found = {
        "trace": trace.name,
        "requests": len(trace.demands),
        "own_rate": trace.own_rate,
        "endless_hit_rate": trace.endless_hit_rate,
        "replays": results,
    }
    path.write_text(report("bench.router_replay", found))


if __name__ == "__main__":
    main()
