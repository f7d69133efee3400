"""What was found, as tables on the terminal."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.measure.experiment import Experiment, Run
from bench.measure.summary_format import Distribution, Summary

_UNBOUNDED = 1000  # columns: to see how wide a table would be
_UNFORESEEN = 0.05  # share of prompt tokens
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")

Columns = list[tuple[str, list[str]]]  # name and a cell for each run


def print_summary(console: Console, run: Run) -> None:
    """One run: verdict, latencies with intervals, throughput, tokens, goodput, clients, checks, own lag."""
    summary = run.summary
    _print_verdict(console, summary)
    table = Table(title=escape(run.label), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("ms", no_wrap=True)
    for name in _STATISTICS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("p50, 95 % interval", justify="right", no_wrap=True)
    for name in ("ttft", "tpot", "itl", "e2e"):
        found: Distribution = getattr(summary, f"{name}_ms")
        interval = found.ci95.get("p50")
        shown = "" if interval is None else f"{number(interval[0])} to {number(interval[1])}"
        table.add_row(name.upper(), *(number(getattr(found, s)) for s in _STATISTICS), shown)
    for name, lag in (("send lag", summary.send_lag_ms), ("loop lag", summary.loop_lag_ms)):
        table.add_row(f"[dim]{name}[/dim]", *(f"[dim]{number(getattr(lag, s))}[/dim]" for s in _STATISTICS), "")
    console.print(table)
    for line in _lines(summary):
        console.print(escape(line), highlight=False, soft_wrap=True)


def _print_verdict(console: Console, summary: Summary) -> None:
    if summary.interrupted:
        console.print("[yellow]The run was interrupted; this is what there is.[/yellow]")
    for reason in summary.invalid_because:
        console.print(f"[bold white on red] INVALID [/] [bold red]{escape(reason)}[/]", highlight=False, soft_wrap=True)
    for kind, count in sorted(summary.errors.items()):
        example = summary.error_examples.get(kind, "")
        console.print(f"[red]{count} failed: {escape(kind)}[/red] {escape(example[:200])}", soft_wrap=True)


def _lines(summary: Summary) -> list[str]:
    through, tokens = summary.throughput, summary.tokens
    lines = [
        f"requests    {summary.completed} of {summary.requests} completed in {summary.measured_s:.1f} s, "
        f"{through.requests_per_s:.2f} a second",
        f"tokens      {through.output_tokens_per_s:.1f} out, {through.input_tokens_per_s:.1f} in a second; "
        f"{tokens.output} out, {tokens.input} in"
        + ("" if tokens.cached is None else f", {tokens.cached} of them cached"),
    ]
    if tokens.cached_by:
        shares = ", ".join(f"{where} {count / max(tokens.input, 1):.1%}" for where, count in tokens.cached_by.items())
        lines.append(f"            of the prompts' tokens were cached: {shares}")
    if (planner := summary.planner) is not None:
        kinds = ", ".join(f"{kind} {count}" for kind, count in planner.by_kind.items()) or "none"
        advised = f", {planner.advised} advised" if planner.mode == "advise" else ""
        lines.append(
            f"planner     {planner.decisions} decisions, actions: {kinds}{advised}; "
            f"{planner.worker_hours:.2f} hours of workers, {planner.failures} failed"
        )
    if tokens.predicted_cached:
        lines.append(f"            an endless cache would have held {tokens.predicted_cached}")
    if tokens.cached and tokens.predicted_cached is not None:
        more = (tokens.cached - tokens.predicted_cached) / max(tokens.input, 1)
        if more > _UNFORESEEN:
            lines.append(
                f"            {more:.0%} of the prompt tokens came from the cache beyond what this run explains: the "
                "server knew these prompts from before; ask others with another --seed"
            )
    if tokens.wrong_input_length or tokens.wrong_output_length:
        lines.append(
            f"            of another length than asked: {tokens.wrong_input_length} prompts, "
            f"{tokens.wrong_output_length} answers"
        )
    if summary.retry_after_s is not None and summary.retry_after_s.count:
        lines.append(f"retry after {number(summary.retry_after_s.p50)} s, said {summary.retry_after_s.count} times")
    if (goodput := summary.goodput) is not None:
        parts = ", ".join(f"{o.name} {o.attainment:.1%}" for o in goodput.objectives)
        lines.append(
            f"goodput     {goodput.requests_per_s:.2f} a second; {goodput.attainment:.1%} met {goodput.slo} ({parts})"
        )
    for kind, clients in sorted(summary.clients.items()):
        odd = "".join(f", {count} {error}" for error, count in sorted(clients.unexpected.items()))
        lines.append(f"{kind:<11} {clients.as_expected} of {clients.sent} as expected{odd}")
    if (check := summary.check) is not None:
        lines.append(f"check       {check.mode}: {check.equal} of {check.compared} answers equal")
        if check.unmatched:
            lines.append(f"            {check.unmatched} answers to prompts that the file does not have")
        lines += [f"            {line}" for line in check.different]
    return lines


def print_steps(console: Console, experiment: Experiment) -> None:
    """One row a run, in one table, or two where the terminal is narrow; own lag of the worst run; the search's end."""
    runs = [run.summary for run in experiment.runs]
    met = [summary.goodput for summary in runs]
    labels = [
        escape(run.label) + ("" if run.summary.valid else " [bold white on red] INVALID [/]") for run in experiment.runs
    ]
    latencies: Columns = [
        ("requests", [str(summary.requests) for summary in runs]),
        ("failed", [f"[red]{count}[/red]" if (count := sum(each.errors.values())) else "0" for each in runs]),
        ("TTFT p50/90/99", [_three(summary.ttft_ms) for summary in runs]),
        ("TPOT p50/90/99", [_three(summary.tpot_ms) for summary in runs]),
        ("ITL p99", [number(summary.itl_ms.p99) for summary in runs]),
    ]
    rates: Columns = [
        ("tokens/s", [number(summary.throughput.output_tokens_per_s) for summary in runs]),
        ("requests/s", [number(summary.throughput.requests_per_s) for summary in runs]),
    ]
    if any(summary.tokens.cached for summary in runs):
        rates.append(("cached", [f"{(s.tokens.cached or 0) / max(s.tokens.input, 1):.0%}" for s in runs]))
    for where in dict.fromkeys(where for summary in runs for where in summary.tokens.cached_by if where != "worker"):
        rates.append((where, [f"{s.tokens.cached_by.get(where, 0) / max(s.tokens.input, 1):.0%}" for s in runs]))
    if any(met):
        rates.append(("SLO met", ["" if each is None else f"{each.attainment:.1%}" for each in met]))
        rates.append(("goodput/s", ["" if each is None else number(each.requests_per_s) for each in met]))
    whole = _steps(experiment.title, labels, [*latencies, *rates])
    if console.measure(whole, options=console.options.update(width=_UNBOUNDED)).maximum <= console.width:
        console.print(whole)
    else:
        console.print(_steps(experiment.title, labels, latencies))
        console.print(_steps("", labels, rates))
    if experiment.stopped_because:
        console.print(f"[yellow]{escape(experiment.stopped_because)}[/yellow]", highlight=False, soft_wrap=True)
    for run in experiment.runs:
        for reason in run.summary.invalid_because:
            console.print(f"[red]{escape(run.label)}: {escape(reason)}[/red]", highlight=False, soft_wrap=True)
    send, loop = (
        number(
            max((lag for run in experiment.runs if (lag := getattr(run.summary, name).p99) is not None), default=None)
        )
        for name in ("send_lag_ms", "loop_lag_ms")
    )
    console.print(f"own lag p99, of the worst run: send lag {send} ms, loop lag {loop} ms", highlight=False)
    if (search := experiment.search) is not None:
        failed = "no rate failed" if search.failed_rate is None else f"{search.failed_rate:g} a second did not hold"
        console.print(
            ("" if search.finished else "The search is not finished. ")
            + f"[bold]{search.rate:g} requests a second[/bold] is the highest rate at which {search.attainment:.0%} "
            f"met the SLO ({failed}); goodput {search.goodput:.2f} a second",
            highlight=False,
            soft_wrap=True,
        )


def _steps(title: str, labels: list[str], columns: Columns) -> Table:
    table = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(labels, *(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def print_ratios(console: Console, experiment: Experiment) -> None:
    """Each target against the first one."""
    table = Table(title="ratios to the first target", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("target", "metric", "first", "this", "ratio", "95 % interval"):
        table.add_column(title, justify="left" if title in ("target", "metric") else "right")
    for ratio in experiment.ratios:
        low, high = ratio.ci95
        table.add_row(
            escape(ratio.target),
            metric_name(ratio.metric),
            number(ratio.base),
            number(ratio.value),
            f"{ratio.ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    console.print(table)


def _three(found: Distribution) -> str:
    if found.p50 is None or found.p90 is None or found.p99 is None:
        return "-"
    digits = 0 if found.p99 >= 100 else 1
    return "/".join(f"{value:.{digits}f}" for value in (found.p50, found.p90, found.p99))


def number(value: float | None) -> str:
    """Three digits at least, and no more than a hundredth."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{1 if value >= 100 else 2}f}"


def metric_name(metric: str) -> str:
    """A metric of `Ratio` in words: "ttft_ms p50" is "TTFT p50"."""
    if metric.startswith("throughput "):
        return metric.removeprefix("throughput ").replace("_per_s", "/s").replace("_", " ")
    name, _, statistic = metric.partition(" ")
    return f"{name.removesuffix('_ms').upper()} {statistic}"
