"""`tandem plan`: the cheapest cluster that keeps to an SLO under a load, or the most load for its cost."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.errors import BenchError
from bench.options import Options, with_options
from bench.simulate import LOAD, KvTokens, Routers, TraceFile, open_loop

_PRECISION = 0.02  # share of a rate to which --goodput looks for it
_SHOWN = 20  # rows of the table
_MOST_PLACED = 256  # GPUs of which all placements are looked at
_AROUND = 2  # workers more and less than the choice that are tried for the curve

Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", help="Card to plan for, never measured: A100, H100, H200, B200 or L40S; several may be mixed."
    ),
]
Timings = Annotated[
    list[Path] | None,
    typer.Option("--timing", help='Measured step times, see docs/simulate.md; several, each with its own "gpus".'),
]


@with_options(*LOAD, "plots")
def plan(
    options: Options,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet --slo.")] = 0.9,
    max_workers: Annotated[int, typer.Option(help="Largest cluster to look at.", min=1, max=4096)] = 64,
    max_gpus: Annotated[int, typer.Option(help="Most GPUs in all; 0: no bound.", min=0, max=32768)] = 0,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Most requests/s for the cost within --max-gpus, whatever --rate is.")
    ] = False,
    trace: TraceFile = None,
    routers: Routers = 1,
    kv_tokens: KvTokens = None,
    timing: Timings = None,
    gpu: Gpus = None,
    model: Annotated[
        str, typer.Option(help="For --gpu: a shape such as llama-8b or llama-70b, or a folder with a config.json.")
    ] = "",
    tensor_parallel: Annotated[
        str, typer.Option(help="For --gpu: GPUs a worker may have, as 1,2,4.  [default: the fewest with room]")
    ] = "",
    price: Annotated[
        list[str] | None, typer.Option(help="What a GPU costs an hour, as H100=2.49.  [default: GPUs are counted]")
    ] = None,
    write: Annotated[
        str, typer.Option(help="Write how to start it: compose or helm, or with a file, as helm=values.yaml.")
    ] = "",
) -> None:
    """Which cluster a load needs: how many workers of which kind, and how many of them should only prefill.

    Simulates clusters as `tandem simulate` does, and shows what it tried; of that the cheapest that holds is chosen.
    It tries no fewer workers than could do the work in the time that --slo leaves, splits them so that both sides are
    about as busy, and bisects their number, so it takes more workers to do no harm. Exits 1 if none holds. Workers that
    prefill and those that decode may have other cards, and other numbers of them: the former need room for a prompt,
    the latter for its answer, too. With --goodput all placements of up to --max-gpus are looked at, each at the most
    requests/s that it holds; less than a thousandth of what its steps could do counts as none.

    Examples:

      tandem plan --rate 20 --input-len 4000 --output-len 200 --duration 3m --slo ttft=500ms,tpot=20ms

      tandem plan --gpu H100 --gpu H200 --price H100=2.5 --price H200=3.5 --model llama-8b --rate 20 --input-len 4000
      --duration 1m --slo ttft=500ms,tpot=15ms --write helm

      tandem plan --gpu A100 --tensor-parallel 1,2,4 --model llama-8b --goodput --max-gpus 4 --rate 1
      --num-requests 300 --input-len 1000 --slo ttft=200ms,tpot=30ms
    """
    from rich.console import Console

    from bench.deployment_files import parse_write, write_deployment
    from bench.output import require_writable, written
    from bench.replay.offers import offers_of, parse_degrees
    from bench.sweep import parse_ladder

    errors = Console(stderr=True)
    try:
        require_writable(options)
        target = parse_write(write) if write else None
        if not 0 < attainment <= 1:
            raise BenchError(f"--attainment {attainment:g} must be above 0 and at most 1")
        if options.rate and len(parse_ladder(options.rate)) > 1:
            raise BenchError(f"--rate {options.rate} is a ladder, and a plan is for one rate")
        if goodput and not max_gpus:
            raise BenchError("--goodput needs --max-gpus: of how many GPUs placements are made")
        if goodput and max_gpus > _MOST_PLACED:
            raise BenchError(f"--goodput looks at all placements: --max-gpus must be at most {_MOST_PLACED}")
        config = open_loop(options, trace)
        offers = offers_of(kv_tokens, gpu or [], model, parse_degrees(tensor_parallel), timing or [], price or [])
        console = None if options.quiet else errors
        trials = _trials(options, config, routers, attainment, console)
        if goodput:
            choice, tried = _most(trials, offers, max_gpus)
        else:
            choice, tried = _cheapest(trials, offers, max_workers, max_gpus or None)
        with written():
            _tell(options, attainment, choice, tried, unit="cost an hour" if price else "GPUs", goodput=goodput)
        if target is not None and choice is not None:
            with written():
                path = write_deployment(*target, choice[0], measured=not gpu)
            Console().print(f"written: {path}, which says how to start it", highlight=False)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if choice is None:
        bound = f"{max_gpus} GPUs" if max_gpus else f"{max_workers} workers"
        raise_it = "--max-gpus or --max-workers" if max_gpus else "--max-workers"
        print(
            f"error: no cluster of up to {bound} keeps {options.slo} for {100 * attainment:g} % of the "
            f"requests: raise {raise_it}, or loosen --slo",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _trials(options: Options, config: Any, routers: int, attainment: float, console: Any) -> Any:
    """Raises BenchError."""
    from bench.measure.slo import parse_slo
    from bench.replay.planned import planned_trace
    from bench.replay.trials import Trials
    from planner.simulator.settings import Settings

    if not options.slo:
        raise BenchError("a plan needs an SLO: --slo ttft=500ms,tpot=50ms")
    slo = parse_slo(options.slo)
    load = planned_trace(config)
    if len(load.demands) == 1:
        raise BenchError("one request says nothing of a load: raise --num-requests or --duration")
    return Trials(load, config, Settings(routers=routers, seed=config.seed), slo, attainment, console)


def _able(trials: Any, offers: Any) -> list[Any]:
    """Families that could keep to the objectives with enough workers. Raises BenchError without room in any."""
    from planner.sizing import families

    found = families(offers)
    if not any(map(trials.has_room, found)):
        most = max(offer.kv_tokens for offer in offers)
        raise BenchError(f"a request is too long for workers that hold {most} tokens: raise --kv-tokens, or shorten it")
    return [family for family in found if trials.can(family)]


def _cheapest(trials: Any, offers: Any, most: int, gpus: int | None) -> tuple[Any, list[Any]]:
    """The deployment with its trial, or None, and all trials; some around it show what more or less buys."""
    from planner.sizing import cheapest, splits

    works = {family: trials.work(family) for family in _able(trials, offers)}
    found = cheapest([(*each, trials.fewest(each[0])) for each in works.items()], most, gpus, trials.holds)
    if found is not None:
        for workers in range(max(1, found.workers - _AROUND), found.workers + _AROUND + 1):
            for one in splits(found.family, works[found.family], workers):
                trials.run(one)
        found = trials.best(most, gpus)
    tried = sorted(trials.tried.values(), key=lambda one: (one.cost, -one.attainment))
    return (None if found is None else (found, trials.run(found))), tried


def _most(trials: Any, offers: Any, gpus: int) -> tuple[Any, list[Any]]:
    """Likewise; of each placement what it came to at the most requests/s that it holds, the best first."""
    from planner.sizing import most_goodput, placements

    found = most_goodput(placements(_able(trials, offers), gpus), trials.capacity, trials.holds, precision=_PRECISION)
    held = [(each.deployment, trials.run(each.deployment, each.rate)) for each in found if each.rate]
    return (held[0] if held else None), [trial for _, trial in held]


def _tell(options: Options, attainment: float, choice: Any, tried: list[Any], *, unit: str, goodput: bool) -> None:
    """The table, and the files that flags name."""
    import msgspec
    from rich.console import Console

    from bench.deployment_files import start_command
    from bench.replay.trials import frontier

    console, chosen = Console(), None if choice is None else choice[1]
    best = frontier(tried, lambda one: one.rate if goodput else one.attainment)
    _show(console, f"{options.slo} for {100 * attainment:g} %", chosen, tried, best, unit=unit)
    if choice is not None:
        console.print(start_command(choice[0]), soft_wrap=True, highlight=False)
        if choice[0].gpus > choice[0].workers:
            console.print(f"{choice[0].gpus} GPUs in all")
    if options.json is not None:
        found = {
            "slo": options.slo,
            "attainment": attainment,
            "cost": unit,
            "choice": chosen,
            "frontier": best,
            "tried": tried,
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    if options.plots is not None and tried:
        from bench.report.frontier import write_frontier

        path = write_frontier(options.plots, tried, best, wanted=None if goodput else attainment, unit=unit)
        console.print(f"picture: {path}", highlight=False)


def _show(console: Any, title: str, chosen: Any, tried: list[Any], best: list[Any], *, unit: str) -> None:
    from rich.table import Table

    table = Table(title=title)
    for column in ("cluster", unit, "requests/s", "for the cost", "in the SLO, %", "TTFT p90", "TPOT p90, ms", ""):
        table.add_column(column, justify="left" if column == "cluster" else "right")
    for one in tried[:_SHOWN]:
        table.add_row(
            one.cluster,
            f"{one.cost:g}",
            f"{one.rate:.3g}",
            f"{one.rate / one.cost:.3g}",
            f"{100 * one.attainment:.1f}",
            f"{one.ttft_p90_ms or 0:.0f}",
            f"{one.tpot_p90_ms or 0:.1f}",
            "chosen" if one is chosen else "frontier" if one in best else "",
        )
    console.print(table)
    if len(tried) > _SHOWN:
        console.print(f"and {len(tried) - _SHOWN} more; --json has all")
