"""Pictures of runs. Each function draws one figure; nothing global is touched, so that any thread may draw."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.measure.experiment import Experiment, Run
from bench.measure.record import Record
from bench.measure.slo import parse_slo
from bench.measure.summary import completed, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart by nearly all eyes, and in print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    "#8A8F98",
)
_CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
_STYLE: Any = {  # typed by matplotlib as a dict of hundreds of literals
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555B66",
    "axes.labelcolor": "#2B2F36",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E7EB",
    "xtick.color": "#555B66",
    "ytick.color": "#555B66",
    "legend.frameon": False,
    "figure.facecolor": "white",
}
_WIDTH, _HEIGHT = 9.0, 3.9  # inches
_ROWS = 200  # requests of a waterfall at most
_BINS = 120  # steps of a timeline at most
_QUANTILES = (("p50", BLUE), ("p90", ORANGE), ("p99", RED))

Floats = npt.NDArray[np.float64]


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows."""

    name: str
    caption: str
    figure: Figure


def pictures(experiment: Experiment) -> list[Picture]:
    """All pictures of an experiment. Of many runs, the details of the last one are shown."""
    drawn: list[tuple[str, str, Callable[[], Figure]]] = []
    if experiment.kind in ("sweep", "goodput"):
        drawn += [
            ("latency", "TTFT, TPOT and ITL against the load; bands are 95 % intervals", lambda: _latency(experiment)),
            ("throughput", "What came out, and how fast, against the load", lambda: _throughput(experiment)),
        ]
        if any(run.summary.goodput is not None for run in experiment.runs):
            drawn.append(("attainment", "Share of requests that met the SLO", lambda: _attainment(experiment)))
    if experiment.kind == "compare":
        drawn.append(("ratios", "Ratios to the first target, with 95 % intervals", lambda: _ratios(experiment)))
        drawn.append(("rounds", "Medians of each round", lambda: _rounds(experiment)))
    details = [run for run in experiment.runs if completed(counted(run.result.records))]
    if details:
        run = details[-1]
        of = "" if len(experiment.runs) == 1 else f" of {run.label}"
        drawn += [
            ("timeline", f"Timeline{of}: output, requests under way, and those that wait", lambda: _timeline(run)),
            ("itl", f"Gaps between tokens{of}", lambda: _gaps(run)),
            ("distribution", f"TTFT and TPOT{of}: share of requests below", lambda: _distributions(run)),
            ("waterfall", f"Requests{of}: waiting, then streaming", lambda: _waterfall(run)),
        ]
    with rc_context(_STYLE):
        return [Picture(name, caption, draw()) for name, caption, draw in drawn]


def _figure(
    columns: int = 1, rows: int = 1, height: float = _HEIGHT, share_x: bool = False
) -> tuple[Figure, list["Axes"]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
    return figure, list(axes.flat)


def _limits(run: Run) -> dict[str, float]:
    """Limits of the SLO in milliseconds, by name."""
    goodput = run.summary.goodput
    return {} if goodput is None else {limit.name: limit.ms for limit in parse_slo(goodput.slo).limits}


def _limit_line(axes: "Axes", limit: float | None, vertical: bool = False) -> None:
    if limit is not None:
        draw = axes.axvline if vertical else axes.axhline
        draw(limit, color=RED, linestyle=(0, (4, 3)), linewidth=1.2, label=f"SLO {limit:g} ms")


def _latency(experiment: Experiment) -> Figure:
    figure, axes = _figure(columns=3)
    limits = _limits(experiment.runs[0])
    for axis, (metric, title) in zip(axes, (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL")), strict=True):
        for quantile, colour in _QUANTILES:
            points = [
                (_load(run), value, getattr(run.summary, f"{metric}_ms").ci95.get(quantile, (value, value)))
                for run in experiment.runs
                if (value := getattr(getattr(run.summary, f"{metric}_ms"), quantile)) is not None
            ]
            if points:
                xs, ys = [point[0] for point in points], [point[1] for point in points]
                axis.plot(xs, ys, "o-", color=colour, markersize=4, linewidth=1.6, label=quantile)
                lows, highs = zip(*(point[2] for point in points), strict=True)
                axis.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        named = metric if metric in limits else next((name for name in limits if name.startswith(f"{metric}_")), None)
        _limit_line(axis, limits.get(named) if named else None)
        axis.set(title=f"{title}, ms", xlabel=_axis_label(experiment), ylim=(0, None))
        axis.legend(fontsize=8)
    return figure


def _throughput(experiment: Experiment) -> Figure:
    figure, (left, right) = _figure(columns=2)
    loads = [_load(run) for run in experiment.runs]
    output = [run.summary.throughput.output_tokens_per_s for run in experiment.runs]
    left.plot(loads, output, "o-", color=BLUE, markersize=4, label="output tokens/s")
    left.set(title="Output tokens per second", xlabel=_axis_label(experiment), ylim=(0, None))
    shown = [(run, run.summary.tpot_ms.p50) for run in experiment.runs]
    right.plot(
        [value for _, value in shown if value is not None],
        [run.summary.throughput.output_tokens_per_s for run, value in shown if value is not None],
        *("o-",),
        color=GREEN,
        markersize=4,
    )
    for run, value in shown:
        if value is not None:
            at = (value, run.summary.throughput.output_tokens_per_s)
            right.annotate(f"{_load(run):g}", at, xytext=(5, -9), textcoords="offset points", fontsize=8, color=GREY)
    right.set(title="Output tokens per second against TPOT p50", xlabel="TPOT p50, ms", ylim=(0, None), xlim=(0, None))
    return figure


def _attainment(experiment: Experiment) -> Figure:
    figure, (axis,) = _figure()
    runs = [run for run in experiment.runs if run.summary.goodput is not None]
    loads = [_load(run) for run in runs]
    found = [goodput for run in runs if (goodput := run.summary.goodput) is not None]
    axis.plot(loads, [100 * each.attainment for each in found], "o-", color=BLUE, linewidth=2, label="all objectives")
    lows, highs = zip(*(each.ci95 for each in found), strict=True)
    axis.fill_between(loads, 100 * np.array(lows), 100 * np.array(highs), color=BLUE, alpha=0.15, linewidth=0)
    for i, objective in enumerate(found[0].objectives):
        shares = [100 * each.objectives[i].attainment for each in found]
        colour = _CYCLE[1 + i % (len(_CYCLE) - 1)]
        axis.plot(
            loads, shares, "--", color=colour, linewidth=1.2, label=f"{objective.name} ≤ {objective.limit_ms:g} ms"
        )
    if (search := experiment.search) is not None:
        axis.axhline(
            100 * search.attainment, color=GREY, linewidth=1, linestyle=":", label=f"{search.attainment:.0%} asked"
        )
        if search.rate:
            axis.axvline(search.rate, color=GREEN, linewidth=1.4, label=f"highest rate that held: {search.rate:.3g}")
    axis.set(title="SLO attainment, % of requests", xlabel=_axis_label(experiment), ylim=(0, 104))
    axis.legend(fontsize=8, loc="lower left")
    return figure


def _ratios(experiment: Experiment) -> Figure:
    shown = [ratio for ratio in experiment.ratios if np.isfinite(ratio.ratio) and ratio.ratio > 0]
    targets = list(dict.fromkeys(ratio.target for ratio in shown))
    metrics = list(dict.fromkeys(ratio.metric for ratio in shown))
    figure, (axis,) = _figure(height=max(2.2, 0.9 + 0.26 * len(metrics) * max(1, len(targets))))
    axis.axvline(1, color=GREY, linewidth=1)
    for number, target in enumerate(targets):
        mine = [ratio for ratio in shown if ratio.target == target]
        rows = [metrics.index(ratio.metric) + (number + 0.5) / len(targets) - 0.5 for ratio in mine]
        values = np.array([ratio.ratio for ratio in mine])
        lows, highs = (np.array([ratio.ci95[side] for ratio in mine]) for side in (0, 1))
        errors = np.clip(np.stack((values - lows, highs - values)), 0, None)
        colour = _CYCLE[number % len(_CYCLE)]
        axis.errorbar(values, rows, xerr=errors, fmt="o", color=colour, capsize=2.5, markersize=5, label=target)
    base = next((run.target for run in experiment.runs), "")
    axis.set_yticks(range(len(metrics)), [metric.replace("throughput ", "").replace("_", " ") for metric in metrics])
    axis.set(title=f"Ratio to {base}", xscale="log", ylim=(len(metrics) - 0.4, -0.6))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axis.tick_params(axis="x", which="minor", labelsize=8)
    axis.legend(fontsize=8)
    return figure


def _rounds(experiment: Experiment) -> Figure:
    figure, axes = _figure(columns=3)
    targets = list(dict.fromkeys(run.target for run in experiment.runs))
    measures: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
        ("TTFT p50, ms", lambda run: run.summary.ttft_ms.p50),
        ("TPOT p50, ms", lambda run: run.summary.tpot_ms.p50),
        ("Output tokens per second", lambda run: run.summary.throughput.output_tokens_per_s),
    )
    for axis, (title, measure) in zip(axes, measures, strict=True):
        for number, target in enumerate(targets):
            values = [value for run in experiment.runs if run.target == target if (value := measure(run)) is not None]
            colour = _CYCLE[number % len(_CYCLE)]
            axis.bar(number, float(np.median(values)) if values else 0.0, width=0.6, color=colour, alpha=0.35)
            axis.plot(number + np.linspace(-0.15, 0.15, len(values)), values, "o", color=colour, markersize=5)
        axis.set(title=title, ylim=(0, None))
        axis.set_xticks(range(len(targets)), targets)
        axis.grid(visible=False, axis="x")
    return figure


def _timeline(run: Run) -> Figure:
    records = counted(run.result.records)
    begins = np.array([record.sent for record in records])
    ends = np.array([record.end for record in records])
    firsts = np.array([record.sent + record.ttft if record.chunks else record.end for record in records])
    tokens = np.sort([record.sent + chunk for record in records for chunk in record.chunks])
    failed = np.sort([record.end for record in records if record.error])
    start, end = float(begins.min()), float(ends.max())
    step = max((end - start) / _BINS, min(1.0, (end - start) / 20), 1e-3)
    edges = np.arange(start, end + step, step)
    figure, (upper, lower) = _figure(rows=2, height=4.8, share_x=True)
    upper.stairs(np.histogram(tokens, edges)[0] / step, edges, color=BLUE, fill=True, alpha=0.35)
    upper.stairs(np.histogram(tokens, edges)[0] / step, edges, color=BLUE)
    upper.set(title="Messages with tokens per second", ylim=(0, None))
    lower.plot(*_level(begins, ends), color=GREEN, linewidth=1.4, drawstyle="steps-post", label="in flight")
    lower.plot(
        *_level(begins, firsts),
        color=ORANGE,
        linewidth=1.4,
        drawstyle="steps-post",
        label="waiting for the first token",
    )
    if len(failed):
        lower.plot(failed, np.zeros(len(failed)), "x", color=RED, clip_on=False, label="failed")
    lower.set(title="Requests", xlabel="seconds", ylim=(0, None))
    lower.legend(fontsize=8)
    return figure


def _level(begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """(times, how many intervals are open from each time on)."""
    times = np.concatenate((begins, ends))
    changes = np.concatenate((np.ones(len(begins)), -np.ones(len(ends))))
    order = np.argsort(times, kind="stable")
    return times[order], changes[order].cumsum()


def _gaps(run: Run) -> Figure:
    gaps = 1e3 * np.array([gap for record in completed(counted(run.result.records)) for gap in record.gaps])
    figure, (axis,) = _figure()
    if len(gaps):
        top = float(np.quantile(gaps, 0.999)) * 1.1
        axis.hist(np.clip(gaps, 0, top), bins=100, color=BLUE, alpha=0.85, log=True)
        for quantile, colour in (("p50", GREEN), ("p99", ORANGE)):
            value = getattr(run.summary.itl_ms, quantile)
            axis.axvline(value, color=colour, linewidth=1.6, label=f"{quantile} {value:.1f} ms")
        limits = _limits(run)
        _limit_line(axis, next((ms for name, ms in limits.items() if name.startswith("itl")), None), vertical=True)
        axis.legend(fontsize=8)
    axis.set(title="Gaps between messages with tokens (the last bin holds all longer ones)", xlabel="ms", ylabel="gaps")
    return figure


def _distributions(run: Run) -> Figure:
    figure, axes = _figure(columns=2)
    records = completed(counted(run.result.records))
    limits = _limits(run)
    for axis, (metric, colour) in zip(axes, (("ttft", BLUE), ("tpot", GREEN)), strict=True):
        values = np.sort([1e3 * value for record in records if (value := getattr(record, metric)) >= 0])
        if len(values):
            axis.plot(values, 100 * np.arange(1, len(values) + 1) / len(values), color=colour, drawstyle="steps-post")
            for quantile in ("p50", "p90", "p99"):
                value = getattr(getattr(run.summary, f"{metric}_ms"), quantile)
                axis.plot(value, float(quantile[1:]), "o", color=colour, markersize=5)
                axis.annotate(
                    f"{quantile} {value:.1f}", (value, float(quantile[1:])), xytext=(7, -9), textcoords="offset points",
                    fontsize=8,
                )  # fmt: skip
        _limit_line(axis, limits.get(metric), vertical=True)
        if metric in limits:
            axis.legend(fontsize=8, loc="lower right")
        axis.set(title=metric.upper(), xlabel="ms", ylabel="% of requests", ylim=(0, 102))
    return figure


def _waterfall(run: Run) -> Figure:
    records = sorted(counted(run.result.records), key=lambda record: record.sent)
    if len(records) > _ROWS:
        records = [records[i] for i in np.linspace(0, len(records) - 1, _ROWS).astype(int)]
    figure, (axis,) = _figure(height=min(9.0, 1.6 + 0.035 * len(records)) if len(records) > 60 else _HEIGHT)
    rows = np.arange(len(records))
    sent = np.array([record.sent for record in records])
    waited = np.array([_waited(record) for record in records])
    whole = np.array([max(record.e2e, 0.0) for record in records])
    axis.barh(rows, waited, left=sent, height=0.8, color=ORANGE, label="to the first token")
    axis.barh(rows, whole - waited, left=sent + waited, height=0.8, color=BLUE, label="streaming")
    failed = [(record.end, row) for row, record in enumerate(records) if record.error]
    if failed:
        axis.plot([at for at, _ in failed], [row for _, row in failed], "x", color=RED, markersize=5, label="failed")
    axis.set(title="Requests, in the order in which they were sent", xlabel="seconds", ylim=(len(records) - 0.3, -0.7))
    axis.grid(visible=False, axis="y")
    axis.legend(fontsize=8)
    return figure


def _waited(record: Record) -> float:
    return record.ttft if record.chunks else max(record.e2e, 0.0)


def _load(run: Run) -> float:
    return run.load if run.load is not None else 0.0


def _axis_label(experiment: Experiment) -> str:
    return "requests at once" if experiment.axis == "concurrency" else "requests per second asked"
