"""Pictures of a sweep or a search: what happens as the load rises."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from bench.measure.experiment import Experiment, Run
from bench.measure.summary_format import Distribution
from bench.report.style import (
    BLUE,
    CARD,
    CYCLE,
    GREEN,
    GREY,
    INK,
    INVALID,
    QUANTILES,
    RED,
    draw_limit,
    from_zero,
    legend,
    limit_of,
    log_scale,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 20.0  # latencies that spread over more than so many times get a log scale
_CLOSE = 0.06  # labels nearer than this share of an axis would overlap


def latency(experiment: Experiment) -> Figure:
    """TTFT, TPOT and ITL: p50, p90, p99 with intervals, and the limit of the SLO."""
    figure, axes = panels(columns=3, height=4.0)
    for axis, metric in zip(axes, ("ttft", "tpot", "itl"), strict=True):
        found = [(run, _of(run, metric)) for run in experiment.runs if _of(run, metric).count]
        shown = [getattr(each, quantile) for _, each in found for quantile in QUANTILES]
        for quantile, colour in QUANTILES.items():
            points = [(run, getattr(each, quantile)) for run, each in found]
            _curve(axis, points, colour, quantile, [each.ci95.get(quantile) for _, each in found])
        if shown and max(shown) > _WIDE * max(min(shown), 1e-3):
            log_scale(axis, vertical=True)
        else:
            from_zero(axis, x=False)
        from_zero(axis, y=False)
        axis.set(title=f"{metric.upper()}, ms", xlabel=_axis_label(experiment))
        draw_limit(axis, limit_of(metric, experiment.runs[0]))
    legend(axes)
    return figure


def throughput(experiment: Experiment) -> Figure:
    """Output tokens and requests per second against the load, and TPOT against output tokens per second."""
    figure, (output, requests, cost) = panels(columns=3, height=4.0)
    runs = experiment.runs
    _curve(output, [(run, run.summary.throughput.output_tokens_per_s) for run in runs], BLUE)
    from_zero(output)
    output.set(title="Output tokens per second", xlabel=_axis_label(experiment))
    _curve(requests, [(run, run.summary.throughput.requests_per_s) for run in runs], BLUE, "completed")
    met = [(run, goodput.requests_per_s) for run in runs if (goodput := run.summary.goodput) is not None]
    if met:
        _curve(requests, met, GREEN, "met the SLO (goodput)")
    # A conversation of several turns is one of the rate, but several requests.
    if experiment.axis == "rate" and not any(record.turn for run in runs for record in run.result.records):
        highest = max(_load(run) for run in runs)
        requests.plot([0, highest], [0, highest], ":", color=GREY, linewidth=1.4, label="asked")
    from_zero(requests)
    requests.set(title="Requests per second", xlabel=_axis_label(experiment))
    legend([requests], loc="upper left")
    found = [run for run in runs if run.summary.tpot_ms.count]
    for quantile in ("p50", "p99"):
        xs = [run.summary.throughput.output_tokens_per_s for run in found]
        ys = [getattr(run.summary.tpot_ms, quantile) for run in found]
        _line(cost, xs, ys, found, QUANTILES[quantile], quantile)
    from_zero(cost)
    cost.set(title="TPOT, ms", xlabel="output tokens per second")
    draw_limit(cost, limit_of("tpot", runs[0]))
    _label_loads(cost, found)
    legend([cost], loc="lower right")
    return figure


def _label_loads(axis: "Axes", runs: Sequence[Run]) -> None:
    """Writes the load under the points of p50, leaving out those that would overlap."""
    width, height = (high - low for low, high in (axis.get_xlim(), axis.get_ylim()))
    last: tuple[float, float] | None = None
    for run in runs:
        at = run.summary.throughput.output_tokens_per_s, run.summary.tpot_ms.p50 or 0.0
        if last is not None and np.hypot((at[0] - last[0]) / width, (at[1] - last[1]) / height) < _CLOSE:
            continue
        last = at
        axis.annotate(
            f"{_load(run):g}", at, xytext=(0, -14), textcoords="offset points", fontsize=8.5, color=GREY, ha="center"
        )


def attainment(experiment: Experiment) -> Figure:
    """Share of requests that met the SLO as a whole, and each objective; the share that was asked, and the answer."""
    figure, (axis,) = panels()
    found = [(run, goodput) for run in experiment.runs if (goodput := run.summary.goodput) is not None]
    for i, objective in enumerate(found[0][1].objectives):
        axis.plot(
            [_load(run) for run, _ in found],
            [100 * goodput.objectives[i].attainment for _, goodput in found],
            color=(*CYCLE[1:2], *CYCLE[3:])[i % (len(CYCLE) - 2)],
            marker="sv^DP"[i % 5],
            markersize=5,
            linestyle=(0, (4, 2)),
            linewidth=1.2,
            label=f"{objective.name} ≤ {objective.limit_ms:g} ms",
        )
    bands = [(100 * goodput.ci95[0], 100 * goodput.ci95[1]) for _, goodput in found]
    _curve(axis, [(run, 100 * goodput.attainment) for run, goodput in found], BLUE, "all objectives", bands)
    if (search := experiment.search) is not None:
        axis.axhline(100 * search.attainment, color=INK, linewidth=1.2, linestyle=":")
        axis.annotate(
            f"{100 * search.attainment:.4g} % asked",
            (1, 100 * search.attainment), xycoords=("axes fraction", "data"), xytext=(-2, 4),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
        if search.rate:
            label = f"highest rate that held: {search.rate:.3g} a second"
            axis.axvline(search.rate, color=GREEN, linewidth=1.8, label=label)
    from_zero(axis, y=False)
    axis.set(title="SLO attainment, % of requests", xlabel=_axis_label(experiment), ylim=(-3, 104))
    legend([axis])
    return figure


def _curve(
    axis: "Axes",
    points: Sequence[tuple[Run, float]],
    colour: str,
    label: str = "",
    bands: Sequence[tuple[float, float] | None] = (),
) -> None:
    """A value against the load, over a band of its intervals."""
    runs, loads = [run for run, _ in points], [_load(run) for run, _ in points]
    known = [(load, *band) for load, band in zip(loads, bands, strict=False) if band is not None]
    if known:
        at, lows, highs = zip(*known, strict=True)
        axis.fill_between(at, lows, highs, color=colour, alpha=0.16, linewidth=0)
    _line(axis, loads, [value for _, value in points], runs, colour, label)


def _line(
    axis: "Axes", xs: Sequence[float], ys: Sequence[float], runs: Sequence[Run], colour: str, label: str = ""
) -> None:
    """A line with a dot for each run, hollow where the run is not valid."""
    axis.plot(xs, ys, "o-", color=colour, markersize=6.5, markeredgecolor=CARD, label=label or None)
    doubtful = [i for i, run in enumerate(runs) if not run.summary.valid]
    if doubtful:
        axis.plot(
            [xs[i] for i in doubtful], [ys[i] for i in doubtful], "o", color=CARD, markersize=6.5,
            markeredgecolor=RED, markeredgewidth=1.6, label=INVALID,
        )  # fmt: skip


def _of(run: Run, metric: str) -> Distribution:
    return getattr(run.summary, f"{metric}_ms")  # type: ignore[no-any-return]


def _load(run: Run) -> float:
    return run.load if run.load is not None else 0.0


def _axis_label(experiment: Experiment) -> str:
    return "conversations in flight" if experiment.axis == "concurrency" else "rate asked, per second"
