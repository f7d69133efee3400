"""The simulator against clusters that run: `python -m bench.simulator_check measure`, then `compare`.

`measure` starts a cluster by `tandem up`, fits the engine's step times by `tandem profile` (on one prefill and one
decode worker, or one aggregated, of the same flags), sends it a ladder of rates, and keeps every request in a file.
`compare` simulates the same requests at the same moments with those step times, and says how far TTFT and TPOT, p50 and
p90 of each rate, are off: a tenth is allowed. It needs the files alone, so a mended simulator can be held against old
runs.

Workers should have a core, or a card, of their own each, and the client and the other processes some more (`taskset`):
a simulated worker knows no neighbours. On a smaller machine `--core-share` gives each a part of one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.config import LoadConfig, WorkloadConfig
from bench.core_shares import core_shares
from bench.errors import BenchError
from bench.measure.experiment import Run
from bench.measure.slo import Slo, parse_slo
from bench.measure.summary import summarise
from bench.replay.planned import planned_trace
from bench.replay.simulated import simulated
from bench.runner import Runner
from bench.sweep import at_load, parse_ladder
from planner.fitting import Profile
from planner.simulator.settings import Settings

ALLOWED = 0.1  # of a time, by which a simulation may be off
_WARM, _WARM_CLIENTS = 24, 8  # requests before the ladder, and how many of them at once
_UNCOUNTED = 4  # first requests of a rate
_START_SECONDS = 300.0
_TIMES = tuple((name, quantile) for name in ("ttft_ms", "tpot_ms") for quantile in ("p50", "p90"))


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation must know of the workers; the engine's defaults on CPU, or on a card."""

    kv_tokens: int
    max_batched_tokens: int
    max_running: int


ENGINES = {
    "cpu": Engine(kv_tokens=131_072, max_batched_tokens=512, max_running=64),
    "cuda": Engine(kv_tokens=131_072, max_batched_tokens=1280, max_running=256),
}


class Live(msgspec.Struct, kw_only=True):
    """A file of `measure`."""

    name: str
    prefill: int  # workers; 0: all are aggregated
    workers: int
    engine: Engine
    machine: str
    up: list[str]  # flags of `tandem up`
    profile: Profile
    runs: list[Run] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rate: milliseconds of the cluster, and what the simulator says over that."""

    rate: float
    requests: int
    failed: int
    measured: dict[str, float]
    ratios: dict[str, float]
    attainment: tuple[float, float]  # measured, simulated

    @property
    def holds(self) -> bool:
        """Whether no time is off by more than is allowed."""
        return all(abs(ratio - 1) <= ALLOWED + 1e-9 for ratio in self.ratios.values())


@contextlib.contextmanager
def cluster(flags: list[str], share: float | None = None) -> Iterator[tuple[str, str]]:
    """URL and admin URL of a cluster, until the end of the block, each worker with a `share` of a core.

    Raises BenchError.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(port), "--admin-port", "0", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TANDEM_CLUSTER": f"check-{port}"}
    )
    late = threading.Timer(_START_SECONDS, process.terminate)
    late.start()
    try:
        assert process.stdout is not None
        ready = next((event for event in map(json.loads, process.stdout) if event["event"] == "ready"), None)
        late.cancel()
        if ready is None:
            raise BenchError(f"the cluster did not start; run `tandem up {' '.join(flags)}` to see why")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        with core_shares(ready["pids"], share):
            yield str(ready["url"]), str(ready["admin"])
    finally:
        late.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def profiled(url: str, admin: str, options: argparse.Namespace) -> Profile:
    """Step times of the cluster there. Raises BenchError."""
    path = options.json.with_suffix(".profile.json")
    command = [sys.executable, "-m", "services.cli", "profile", "--url", url, "--json", str(path), "--quiet"]
    command += ["--admin", admin, "--prompts", options.prompts]
    command += ["--batches", options.batches, "--contexts", options.contexts]
    command += ["--tokenizer", options.tokenizer] if options.tokenizer else []
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise BenchError("the cluster could not be profiled, see above")
    return msgspec.json.decode(path.read_bytes(), type=Profile)


def measure(options: argparse.Namespace) -> None:
    """Profile and ladder of one deployment, into a file that grows with each rate."""
    prefill, decode, aggregated = options.prefill, options.decode, options.aggregated
    if not aggregated and not (prefill and decode):
        raise BenchError("give --prefill and --decode, or --aggregated")
    many = ["--aggregated", str(aggregated)] if aggregated else ["--prefill", str(prefill), "--decode", str(decode)]
    few = ["--aggregated", "1"] if aggregated else ["--prefill", "1", "--decode", "1"]
    found = None if options.timing is None else msgspec.json.decode(options.timing.read_bytes(), type=Profile)
    if found is None and few != many:
        with cluster([*few, *options.up], options.core_share) as (url, admin):
            found = profiled(url, admin, options)
    with cluster([*many, *options.up], options.core_share) as (url, admin):
        found = found or profiled(url, admin, options)
        timing = msgspec.structs.replace(found.timing, reserve_waits=options.engine == "cpu")
        live = Live(
            name=f"{aggregated} aggregated" if aggregated else f"{prefill}P{decode}D",
            prefill=0 if aggregated else prefill,
            workers=aggregated or prefill + decode,
            engine=msgspec.structs.replace(
                ENGINES[options.engine], **({"kv_tokens": options.kv_tokens} if options.kv_tokens else {})
            ),
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
            + (f", {options.core_share:g} of one for each worker" if options.core_share else ""),
            up=[*many, *options.up],
            profile=msgspec.structs.replace(found, timing=timing),
        )
        asyncio.run(_ladder(live, url, options))


async def _ladder(live: Live, url: str, options: argparse.Namespace) -> None:
    runner = Runner("", parse_slo(options.slo), None)
    workload = WorkloadConfig(input_len=options.input_len, output_len=options.output_len)
    base = LoadConfig(
        url=url,
        tokenizer=options.tokenizer,
        workload=workload,
        duration=options.seconds,
        seed=options.seed + 1,
        warmup=_UNCOUNTED,
    )
    warm = msgspec.structs.replace(base, concurrency=_WARM_CLIENTS, num_requests=_WARM, duration=None)
    await runner.probe(warm, "warm-up")
    for number, rate in enumerate(parse_ladder(options.rates)):
        config = at_load(msgspec.structs.replace(base, seed=options.seed + 2 + number), rate)
        run = await runner.probe(config, f"{rate:g} req/s")
        live.runs.append(msgspec.structs.replace(run, load=rate))
        options.json.write_bytes(msgspec.json.encode(live))
        times = ", ".join(f"{name} {getattr(getattr(run.summary, name), quantile):.1f}" for name, quantile in _TIMES)
        print(f"{live.name} at {rate:g}/s: {run.summary.completed} of {run.summary.requests}, {times}", flush=True)


def settings_of(live: Live, profile: Profile) -> Settings:
    """Of the simulated cluster."""
    settings = Settings(workers=live.workers, prefill_workers=live.prefill, timing=profile.timing, gateways=1)
    return replace(settings, **msgspec.structs.asdict(live.engine))


def compared(live: Live, slo: Slo | None) -> list[Row]:
    """A row for each rate."""
    settings = settings_of(live, live.profile)
    rows = []
    for run in live.runs:
        trace = planned_trace(run.config)
        made = simulated(trace, run.config, settings, policy="prefix", slo=slo, label="simulated", console=None)
        real = summarise(run.config, run.result, slo)
        measured, ratios = {}, {}
        for name, quantile in _TIMES:
            milliseconds, told = (getattr(getattr(each, name), quantile) for each in (real, made.summary))
            measured[f"{name[:4]}_{quantile}"] = round(milliseconds, 2)
            ratios[f"{name[:4]}_{quantile}"] = round(told / milliseconds, 3)
        shares = [each.goodput.attainment if each.goodput else 1.0 for each in (real, made.summary)]
        row = Row(
            rate=run.load or 0.0,
            requests=real.requests,
            failed=sum(real.errors.values()),
            measured=measured,
            ratios=ratios,
            attainment=(round(shares[0], 3), round(shares[1], 3)),
        )
        rows.append(row)
    return rows


def compare(options: argparse.Namespace) -> None:
    """Simulates what was measured, shows it, and writes the report."""
    slo = parse_slo(options.slo)
    table = Table(title="simulated / measured (measured, ms)")
    names = [f"{name[:4]}_{quantile}" for name, quantile in _TIMES]
    for column in ("deployment", "rate", "requests", *names, "attainment: measured, simulated", "within a tenth"):
        table.add_column(column, justify="right")
    report: list[dict[str, Any]] = []
    for path in options.files:
        live = msgspec.json.decode(path.read_bytes(), type=Live)
        rows = compared(live, slo)
        for row in rows:
            cells = [f"{row.ratios[name]:.2f} ({row.measured[name]:.1f})" for name in names]
            attained = "{:.2f}, {:.2f}".format(*row.attainment)
            count = f"{row.requests} ({row.failed} failed)" if row.failed else str(row.requests)
            table.add_row(live.name, f"{row.rate:g}", count, *cells, attained, "yes" if row.holds else "no")
        about = {"name": live.name, "machine": live.machine, "up": live.up, "profile": live.profile}
        about["workload"] = live.runs[0].config.workload if live.runs else None
        report.append(about | {"rates": [msgspec.structs.asdict(row) | {"holds": row.holds} for row in rows]})
    Console(width=160).print(table)
    if options.json is not None:
        made = {"slo": options.slo, "allowed": ALLOWED, "deployments": report}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    live = commands.add_parser("measure", help="profile and ladder on a cluster that runs")
    live.set_defaults(run=measure)
    live.add_argument("--json", type=Path, required=True, help="where profile and requests are kept")
    live.add_argument("--prefill", type=int, default=0, help="prefill workers")
    live.add_argument("--decode", type=int, default=0, help="decode workers")
    live.add_argument("--aggregated", type=int, default=0, help="workers that do both, instead")
    live.add_argument("--engine", choices=list(ENGINES), default="cpu", help="whose defaults the workers have (cpu)")
    live.add_argument("--kv-tokens", type=int, help="of each worker's cache (131,072: give `up` as many blocks)")
    live.add_argument("--tokenizer", default="", help="folder with tokenizer.json, where the model's name tells none")
    live.add_argument("--timing", type=Path, help="file of `tandem profile`, instead of profiling here")
    live.add_argument("--core-share", type=float, help="part of a core that each worker gets (all that there is)")
    live.add_argument("--prompts", default="64,128,256,400,500", help="lengths of prompts of the profile")
    live.add_argument("--batches", default="1,2,4,8", help="answers together in the profile")
    live.add_argument("--contexts", default="64,400", help="lengths of the prompts before these")
    live.add_argument("--rates", default="0.5,1,1.5,2", help="requests a second")
    live.add_argument("--seconds", type=float, default=60.0, help="in which requests of a rate are sent")
    live.add_argument("--input-len", default="64-400", help="tokens, as of `tandem bench`")
    live.add_argument("--output-len", default="16-64", help="tokens, likewise")
    live.add_argument("--seed", type=int, default=1)
    live.add_argument("up", nargs="*", help="behind --: flags of `tandem up`")
    both = commands.add_parser("compare", help="simulate what was measured")
    both.set_defaults(run=compare)
    both.add_argument("files", type=Path, nargs="+", help="of `measure`")
    both.add_argument("--json", type=Path, help="where to write the report")
    for each in (live, both):
        each.add_argument("--slo", default="ttft=1s,tpot=100ms", help="of the attainment")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        options.run(options)
    except BenchError as error:
        sys.exit(f"error: {error}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
