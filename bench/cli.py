"""`tandem bench`: load tests of any OpenAI-compatible server."""

import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.errors import BenchError
from bench.options import Options, load_config, number, with_options

if TYPE_CHECKING:
    from bench.config import LoadConfig
    from bench.measure.experiment import Experiment
    from bench.runner import Runner

app = typer.Typer(
    no_args_is_help=True,
    help="Load tests of any OpenAI-compatible server: TTFT, TPOT, ITL, goodput. docs/bench.md defines every number.",
    rich_markup_mode="markdown",
)


class CheckMode(StrEnum):
    """How answers are checked."""

    greedy = "greedy"


@app.command()
@with_options()
def run(
    options: Options,
    check: Annotated[
        CheckMode | None, typer.Option(help="greedy: ask a sample again, alone, and compare the text.")
    ] = None,
    expect: Annotated[
        Path | None, typer.Option(help="Compare answers with those of a --records file made with --keep-text.")
    ] = None,
) -> None:
    """One load: an open loop with --rate or a trace, else a closed loop with --concurrency. Ctrl-C still reports.

    Examples:

      tandem bench run --rate 4 --duration 1m --input-len 512 --output-len 128 --slo ttft=500ms,tpot=50ms

      tandem bench run --concurrency 16 --workload multi-turn --report report.html

      tandem bench run --workload mooncake --length-scale 1/16 --speed 0.5 --window 0-10m

      tandem bench run --url https://example.com/v1 --model llama --tokenizer ./llama --records requests.parquet
    """

    async def measure(runner: "Runner") -> "Experiment":
        from bench.measure.experiment import Experiment

        if check and expect:
            raise BenchError("choose --check greedy or --expect, not both")
        config = _loaded(options)
        done = await runner.probe(config, _title(config))
        return Experiment(kind="run", title=f"{done.config.model}: {done.label}", runs=[done])

    _carry_out(options, measure, check.value if check else "", expect)


@app.command()
@with_options()
def sweep(
    options: Options,
    steps: Annotated[int, typer.Option(help="Steps, when neither --rate nor --concurrency names them.", min=2)] = 6,
) -> None:
    """A ladder of loads, one run each: how latency and throughput change with the load.

    --rate or --concurrency name the ladder: "1,2,4,8", "1-16x2" (doubling) or "2-10+2" (by two). Without them, the
    highest rate is found first, and the steps lead up to it.

    Example:

      tandem bench sweep --rate 0.5-8x2 --duration 30s --slo ttft=500ms,tpot=50ms --report sweep.html --plots pictures
    """

    async def measure(runner: "Runner") -> "Experiment":
        from bench.sweep import auto_ladder, parse_ladder, sweep_loads

        config = load_config(options)
        if options.rate and options.concurrency:
            raise BenchError("choose a ladder of --rate or of --concurrency, not both")
        axis = "concurrency" if options.concurrency else "rate"
        given = options.concurrency or options.rate
        loads = parse_ladder(given) if given else await auto_ladder(config, steps, runner.probe)
        return await sweep_loads(config, loads, axis, runner.probe, runner.stop)

    _carry_out(options, measure)


@app.command()
@with_options()
def goodput(
    options: Options,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet the SLO.")] = 0.9,
    tolerance: Annotated[float, typer.Option(help="Relative width at which the search ends.")] = 0.05,
    max_probes: Annotated[int, typer.Option(help="Runs at most.", min=2)] = 16,
) -> None:
    """The highest rate at which enough requests meet the SLO: doubles from --rate until it fails, then bisects.

    Example:

      tandem bench goodput --slo ttft=500ms,tpot=50ms --rate 1 --duration 30s --report goodput.html
    """

    async def measure(runner: "Runner") -> "Experiment":
        from bench.goodput import find_goodput

        if not options.slo:
            raise BenchError("goodput needs an SLO: --slo ttft=500ms,tpot=50ms")
        if options.concurrency:
            raise BenchError("goodput searches the rate of an open loop: leave out --concurrency")
        if not 0 < attainment <= 1:
            raise BenchError(f"--attainment {attainment:g} must be above 0 and at most 1")
        start = number(options.rate, "--rate") if options.rate else 1.0
        config = load_config(options)
        return await find_goodput(
            config,
            runner.probe,
            attainment=attainment,
            start=start,
            tolerance=tolerance,
            max_probes=max_probes,
            stop=runner.stop,
        )

    _carry_out(options, measure)


@app.command()
@with_options()
def compare(
    targets: Annotated[
        list[str],
        typer.Argument(help="URL or command with {port}, each perhaps named: NAME=http://... or 'NAME=cmd {port}'."),
    ],
    options: Options,
    rounds: Annotated[int, typer.Option(help="Runs of each target.", min=2)] = 3,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Leave all commands running, instead of one at a time.")
    ] = False,
) -> None:
    """Several targets under the same load, in alternation, so that drift of the machine hits all alike.

    Commands are started for their turn and stopped after it. Ratios are to the first target.

    Example:

      tandem bench compare 'apart=tandem up --port {port}' 'together=tandem up --aggregated 1 --port {port}' --rate 2
    """

    async def measure(runner: "Runner") -> "Experiment":
        import msgspec

        from bench.compare import compare_targets
        from bench.load.server import settle
        from bench.targets import parse_target

        parsed = [parse_target(text) for text in targets]
        config = _loaded(options)
        for target in parsed:
            if target.url:  # found out before the first load is made
                await settle(msgspec.structs.replace(config, url=target.url), options.api_key)
        return await compare_targets(config, parsed, rounds, keep_running, runner.probe, runner.stop)

    _carry_out(options, measure)


def _loaded(options: Options) -> "LoadConfig":
    """The configuration with its rate or concurrency. Raises BenchError."""
    import msgspec

    config = load_config(options)
    if options.rate and options.concurrency:
        raise BenchError("choose --rate (open loop) or --concurrency (closed loop), not both")
    if options.rate:
        return msgspec.structs.replace(config, rate=number(options.rate, "--rate"))
    if config.arrival == "trace" and not options.concurrency:
        return config
    clients = number(options.concurrency or "8", "--concurrency")
    if clients != int(clients):
        raise BenchError(f"--concurrency {options.concurrency} must be a whole number")
    return msgspec.structs.replace(config, concurrency=int(clients))


def _title(config: "LoadConfig") -> str:
    if config.concurrency is not None:
        return f"{config.workload.name}, {config.concurrency} at once"
    if config.rate is not None:
        return f"{config.workload.name}, {config.rate:g} a second"
    return f"{config.workload.name}, {config.workload.speed:g} times as fast as recorded"


Measure = Callable[["Runner"], Coroutine[Any, Any, "Experiment"]]


def _carry_out(options: Options, measure: Measure, check: str = "", expect: Path | None = None) -> None:
    """Runs the command and shows and writes what it found. Exits 1 for what a user can mend, and for wrong answers."""
    from rich.console import Console

    from bench.measure.slo import parse_slo
    from bench.output import require_writable, show, write

    errors = Console(stderr=True)
    try:
        require_writable(options)
        slo = parse_slo(options.slo) if options.slo else None
        experiment = _run(measure, options, slo, None if options.quiet else errors, check, expect)
        show(experiment, Console())
        write(experiment, options, errors)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    checks = [done.summary.check for done in experiment.runs if done.summary.check is not None]
    if any(found.equal < found.compared or not found.compared for found in checks):
        raise typer.Exit(1)


def _run(measure: Measure, options: Options, slo: Any, console: Any, check: str, expect: Path | None) -> "Experiment":
    import asyncio

    import uvloop

    from bench.runner import Runner

    async def main() -> "Experiment":
        runner = Runner(options.api_key, slo, console, check, expect)
        with runner.stopped_by_signals():
            return await measure(runner)

    try:
        return uvloop.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
