"""What tiers, peers and policies of tiers do to first tokens: `python -m bench.tier_replay --json F`.

`tandem simulate` in a grid: the router's own code, workers with the engine's blocks and order of prompts, the KV
service with the policies' own code (`planner.simulator`). A working set of 2 means that the trace has twice as many
distinct blocks as all workers' caches have room for. Host memory holds as much as these together (--host), the disk and
Redis more (--disk, --redis). Ways:

- off: workers' own caches; peer: they fetch from each other, too
- host, disk, redis: the KV service with host memory; a disk beneath; Redis beneath that. No fetches from peers
- all: all of that, and fetches from peers

Each way is replayed with `lru`, and where --policies names others, those of --policy-ways with these. `optimum` is
Belady's, which knows the trace. `change`: mean and p90 of TTFT to the same load with tiers off.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.errors import BenchError
from bench.provenance import report
from bench.replay.report import summarise
from bench.replay.traces import GENERATED, TRACES_VARIABLE, load_trace
from bench.router_replay import check_fits
from kv_transfer.tiers.policies import POLICIES
from planner.simulator.cluster import Cluster
from planner.simulator.demand import Trace
from planner.simulator.foresight import OPTIMUM
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.settings import KvSettings, Settings
from planner.simulator.timing import Timing

WAYS = ("off", "peer", "host", "disk", "redis", "all")
_HEAD = (
    "| trace | working set | tiers | policy | hit rate, % | of it peers | host | disk | Redis "
    "| TTFT p50 | p90 | p99, s | change of mean, % | of p90, % |\n" + "|---" * 14 + "|"
)


def settings_for(way: str, policy: str, gpu_tokens: int, arguments: argparse.Namespace) -> Settings:
    """A cluster whose workers' caches hold `gpu_tokens` together."""
    depth = {"host": 1, "disk": 2, "redis": 3, "all": 3}.get(way, 0)
    sizes = [int(share * gpu_tokens) for share in (arguments.host, arguments.disk, arguments.redis)]
    host, disk, redis = (size if at < depth else 0 for at, size in enumerate(sizes))
    return Settings(
        workers=arguments.workers,
        kv_tokens=gpu_tokens // arguments.workers,
        kv=KvSettings(host, disk, redis, policy),
        peer_fetch=way in ("peer", "all"),
        timing=Timing(
            disk_read_bytes=1e9 * arguments.disk_read,
            disk_write_bytes=1e9 * arguments.disk_write,
            redis_bytes=1e9 * arguments.redis_rate,
        ),
        seed=arguments.seed,
    )


def replay(trace: Trace, rate: float, settings: Settings, progress: Progress, label: str) -> dict[str, Any]:
    """One cell of the grid. Raises BenchError if a request can never fit."""
    check_fits(trace, settings)
    cluster = Cluster(trace, rate * settings.workers, "prefix", settings)
    task = progress.add_task(label, total=len(trace.demands))
    cluster.run(lambda: progress.advance(task))
    progress.remove_task(task)
    found = summarise(cluster, ttft=2.0, tpot=0.05)
    found["ttft_s"]["mean"] = sum(flight.ttft for flight in cluster.flights) / len(cluster.flights)
    stores = (
        {}
        if cluster.kv is None
        else {"host": cluster.kv.host} | {name: store.kept for name, store in cluster.kv.stores.items()}
    )
    found["written_blocks"] = {name: kept.writes for name, kept in stores.items()}
    return found


def _row(cell: dict[str, Any], off: dict[str, Any]) -> str:
    ttft, before, restored = cell["ttft_s"], off["ttft_s"], cell["restored_rate"]
    shares = (cell["hit_rate"], cell["fetched_rate"] - sum(restored.values()))
    shares += tuple(restored.get(tier, 0.0) for tier in ("host", "disk", "redis"))
    columns = [cell["trace"], f"{cell['working_set']:g}", cell["way"], cell["policy"]]
    columns += [f"{100 * share:.1f}" for share in shares]
    columns += [f"{ttft[name]:.3g}" for name in ("p50", "p90", "p99")]
    columns += [f"{100 * (ttft[name] / before[name] - 1):+.1f}" for name in ("mean", "p90")]
    return "| " + " | ".join(columns) + " |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", default="tool_agent", help=f"like a,b: {', '.join(GENERATED)} (generated), or names in --folder"
    )
    parser.add_argument("--folder", help=f"where traces lie as NAME.jsonl; otherwise {TRACES_VARIABLE} says it")
    parser.add_argument("--requests", type=int, default=4000, help="the first so many of each trace; 0: all")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and worker")
    parser.add_argument("--working-sets", default="0.5,1,2,4", help="distinct blocks, times the workers' caches")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}; off is replayed in any case")
    parser.add_argument("--policies", default="", help=f"of {', '.join([*POLICIES, OPTIMUM])}, or all; none but lru")
    parser.add_argument("--policy-ways", default="disk", help=f"that are replayed with these: {', '.join(WAYS[2:])}")
    parser.add_argument("--host", type=float, default=1.0, help="host memory, times the workers' caches")
    parser.add_argument("--disk", type=float, default=2.0, help="likewise")
    parser.add_argument("--redis", type=float, default=4.0, help="likewise")
    parser.add_argument("--disk-read", type=float, default=12.0, help="GB/s; 12 and 6: one NVMe drive of PCIe 5")
    parser.add_argument("--disk-write", type=float, default=6.0, help="GB/s")
    parser.add_argument("--redis-rate", type=float, default=3.1, help="GB/s, both ways; 3.1: a network of 25 Gbit/s")
    parser.add_argument("--quick", action="store_true", help="500 requests, working sets of 1 and 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the report, after each replay")
    return parser


def main() -> None:
    """The command: a table in Markdown, and the JSON."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.working_sets = 500, "1,4"
    known = [*POLICIES, OPTIMUM]
    policies = known if arguments.policies == "all" else [each for each in arguments.policies.split(",") if each]
    ways = [each for each in arguments.ways.split(",") if each and each != "off"]
    policy_ways = arguments.policy_ways.split(",")
    if unknown := {*policies, *ways} - {*known, *WAYS} or {*policy_ways} - {*WAYS[2:]}:
        parser.error(f"there is no {min(unknown)!r}; ways are {', '.join(WAYS)}, policies {', '.join(known)}")
    cells = [("off", "lru"), *((way, "lru") for way in ways)]
    cells += [(way, policy) for way in policy_ways for policy in policies if policy != "lru"]
    results: list[dict[str, Any]] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    print(_HEAD, flush=True)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            names = arguments.traces.split(",")
            working_sets = [float(each) for each in arguments.working_sets.split(",")]
            grid = progress.add_task("replays", total=len(names) * len(working_sets) * len(cells))
            for name in names:
                trace = load_trace(name, arguments.folder, limit=arguments.requests, seed=arguments.seed)
                distinct = len({each for demand in trace.demands for each in demand.hashes})
                for working_set in working_sets:
                    gpu_tokens = int(distinct * BLOCK_SIZE / working_set)
                    off: dict[str, Any] = {}
                    for way, policy in cells:
                        settings = settings_for(way, policy, gpu_tokens, arguments)
                        found = replay(trace, arguments.rate, settings, progress, f"{name} {working_set:g} {way}")
                        cell = {"trace": trace.name, "working_set": working_set, "way": way, "policy": policy, **found}
                        off = off or cell
                        results.append(cell)
                        print(_row(cell, off), flush=True)
                        progress.advance(grid)
                        if arguments.json is not None:
                            arguments.json.write_text(report("bench.tier_replay", {"replays": results}))
    except BenchError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
