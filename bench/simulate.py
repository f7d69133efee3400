"""`tandem simulate`: a load run on a cluster that does not exist, by the router's own code on a clock of its own."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.errors import BenchError
from bench.options import Options, between, load_config, with_options

if TYPE_CHECKING:
    from bench.config import LoadConfig

LOAD = (
    "rate", "arrival", "burstiness", "ramp_to", "num_requests", "duration", "warmup", "seed", "workload", "data",
    "input_len", "output_len", "prefix_len", "groups", "turns", "think", "speed", "length_scale", "limit", "window",
    "slo", "json", "quiet",
)  # fmt: skip

_RATES = 1e-6, 1e6  # conversations a second that there can be

TraceFile = Annotated[
    Path | None, typer.Option(help="File in Mooncake's format: short for --workload mooncake --data FILE.")
]
Routers = Annotated[int, typer.Option(help="Routers that share the requests.", min=1, max=256)]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens that each worker's KV cache holds.  [default: as --timing says, or 8B on an H200]", min=1
    ),
]
_Tier = "TOKENS|SIZE"
KvMemoryHost = Annotated[
    str | None,
    typer.Option(help="KV service with so much host memory, which keeps prefixes of all workers.", metavar=_Tier),
]
KvDisk = Annotated[str | None, typer.Option(help="Disk beneath that memory.", metavar=_Tier)]
KvRedis = Annotated[str | None, typer.Option(help="Redis beneath that memory, and beneath the disk.", metavar=_Tier)]
PlannerMode = Annotated[
    Literal["off", "advise", "act"],
    typer.Option(help="The planner's own code: off, tells what it would do, or adds, removes and flips workers."),
]
TimingFile = Annotated[
    Path | None, typer.Option(help="JSON file of what steps take; see docs/simulate.md.  [default: 8B on an H200]")
]


@with_options(*LOAD, "records", "report", "plots")
def simulate(
    options: Options,
    workers: Annotated[int, typer.Option(help="Workers in all.", min=1, max=4096)] = 16,
    prefill: Annotated[
        int, typer.Option(help="Of them, that only prefill; the others decode. 0: all do both.", min=0)
    ] = 0,
    trace: TraceFile = None,
    policy: Annotated[str, typer.Option(help="Of the router, as for `tandem up`.")] = "prefix",
    routers: Routers = 1,
    kv_tokens: KvTokens = None,
    kv_memory_host: KvMemoryHost = None,
    kv_disk: KvDisk = None,
    kv_redis: KvRedis = None,
    timing: TimingFile = None,
    planner: PlannerMode = "off",
    max_workers: Annotated[
        int, typer.Option(help="With --planner act: at most so many.  [default: twice --workers]", min=0, max=4096)
    ] = 0,
    interval: Annotated[float, typer.Option(help="Seconds between two decisions.", min=1.0)] = 30.0,
    start: Annotated[float, typer.Option(help="Seconds until an added or a failed worker is ready.", min=0.0)] = 120.0,
    failures: Annotated[float, typer.Option(help="Failures of each worker in an hour, up to 360.", min=0.0)] = 0.0,
) -> None:
    """What a cluster would do with a load, before there is one: the load test's numbers, without any worker.

    Requests are placed by the router's own code; workers have the engine's KV blocks and order of prompts, but their
    steps only take time. The load, the tables and the files are those of `tandem bench`; several rates are a ladder.

    Examples:

      tandem simulate --workers 8 --prefill 3 --rate 4-32x2 --input-len 4000 --duration 10m --slo ttft=1s,tpot=30ms

      tandem simulate --workers 16 --trace conversation.jsonl --speed 4 --report report.html

      tandem simulate --workers 2 --rate 8 --duration 20m --slo ttft=1s,tpot=50ms --planner act --max-workers 8

      tandem simulate --workers 8 --rate 6 --workload multi-turn --duration 10m --kv-memory-host 512GiB --kv-disk 4TiB
    """
    from rich.console import Console

    from bench.measure.experiment import Experiment, Run
    from bench.measure.slo import parse_slo
    from bench.output import require_writable, show, write
    from bench.replay.piloted import Piloting
    from bench.replay.planned import planned_trace
    from bench.replay.simulated import DISK_FLAG, HOST_FLAG, REDIS_FLAG, require_policy, settings_of, simulated
    from bench.sweep import parse_ladder, sweep_loads

    errors = Console(stderr=True)
    try:
        require_writable(options)
        tiers = {HOST_FLAG: kv_memory_host, DISK_FLAG: kv_disk, REDIS_FLAG: kv_redis}
        piloting = Piloting(planner, max_workers, interval, start, failures)
        require_policy(policy, tiers, piloting)
        slo = parse_slo(options.slo) if options.slo else None
        config = open_loop(options, trace)
        settings = settings_of(workers, prefill, routers, kv_tokens, timing, config.seed, tiers)

        def run_of(config: "LoadConfig", label: str) -> Run:
            console = None if options.quiet else errors
            load = planned_trace(config)
            return simulated(
                load, config, settings, policy=policy, slo=slo, label=label, console=console, piloting=piloting
            )

        async def probe(config: "LoadConfig", label: str) -> Run:
            return run_of(config, label)

        loads = parse_ladder(options.rate) if options.rate else []
        if len(loads) > 1:
            experiment = asyncio.run(sweep_loads(config, loads, "rate", probe))
        else:
            run = run_of(config, f"{workers} workers, {config.workload.name}")
            experiment = Experiment(kind="run", title=f"simulated {run.label}", runs=[run])
        show(experiment, Console())
        write(experiment, options, errors)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def open_loop(options: Options, trace: Path | None) -> "LoadConfig":
    """The load, at the first of its rates. Raises BenchError where nothing says when requests come, and for numbers
    that no load has.
    """
    import msgspec

    from bench.sweep import parse_ladder
    from bench.workloads.lengths import LONGEST

    if trace is not None:
        options = replace(options, workload="mooncake", data=str(trace))
    config = load_config(options)
    between(config.workload.speed, "--speed", 1e-6, 1e6)
    between(config.workload.length_scale, "--length-scale", 1e-6, 1e6)
    between(config.workload.prefix_len, "--prefix-len", 0, LONGEST)
    between(config.burstiness, "--burstiness", 1e-3, 1e3)
    if config.duration is not None:
        between(config.duration, "--duration", 1e-3, 1e9)
    rates = [between(rate, "--rate", *_RATES) for rate in parse_ladder(options.rate)] if options.rate else []
    if config.ramp_to is not None:
        between(config.ramp_to, "--ramp-to", *_RATES)
    if rates:
        return msgspec.structs.replace(config, rate=rates[0])
    if config.arrival != "trace":
        raise BenchError("give --rate: how many conversations come in a second")
    return config
