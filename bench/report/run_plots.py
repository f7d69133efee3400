"""Pictures of the requests of runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.measure.experiment import Run
from bench.measure.record import INTERRUPTED, Record
from bench.measure.summary import completed, counted
from bench.report.style import (
    BLUE,
    CARD,
    CYCLE,
    GREEN,
    INK,
    ORANGE,
    PLATE,
    QUANTILES,
    RED,
    draw_limit,
    legend,
    limit_of,
    log_scale,
    panels,
)
from bench.report.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 200  # requests of a waterfall at most
_BINS = 120  # of a timeline at most
_INSTANTS = 800  # at which requests under way are counted
_POINTS = 1000  # of a distribution at most
_WIDE = 20.0  # a latency whose largest value is so many times its median gets a log scale

Floats = npt.NDArray[np.float64]


def timeline(run: Run) -> Figure:
    """Output tokens per second, requests that wait and that stream, and, where there are any, failures by kind."""
    records = _sent(run)
    sent = np.array([record.sent for record in records])
    ends = np.array([_end(record) for record in records])
    firsts = np.array([record.sent + _waited(record) for record in records])
    start, end = float(sent.min()), float(ends.max())
    bins = int(np.clip(end - start, 20, _BINS))
    edges = np.linspace(start, max(end, start + 1e-3), bins + 1)
    arrivals = np.array([record.sent + chunk for record in records for chunk in record.chunks])
    # A message may carry several tokens.
    tokens = np.array([record.tokens / len(record.chunks) for record in records for _ in record.chunks])
    errors = list(run.summary.errors)
    heights = [3.0, 3.0, 1.3] if errors else [3.0, 3.0]
    figure, axes = panels(rows=len(heights), height=0.85 * sum(heights), sharex=True, height_ratios=heights)
    output, under_way = axes[:2]
    rate = np.histogram(arrivals, edges, weights=tokens)[0] / (edges[1] - edges[0])
    output.stairs(rate, edges, color=BLUE, fill=True, alpha=0.25)
    output.stairs(rate, edges, color=BLUE, linewidth=1.4)
    output.set(title="Output tokens per second", ylim=(0, None), xlim=(start, edges[-1]))
    instants = np.linspace(start, end, _INSTANTS)
    waiting, in_flight = _open(sent, firsts, instants), _open(sent, ends, instants)
    under_way.fill_between(
        instants, waiting, in_flight, step="post", color=BLUE, alpha=0.25, linewidth=0, label="streaming"
    )
    under_way.fill_between(
        instants, 0, waiting, step="post", color=ORANGE, alpha=0.7, linewidth=0, label="waiting for the first token"
    )
    under_way.plot(instants, in_flight, drawstyle="steps-post", color=INK, linewidth=1, label="in flight")
    under_way.set(title="Requests", ylim=(0, None))
    if errors:
        failed = [[record.end for record in records if record.error == kind] for kind in errors]
        colours = [(RED, *CYCLE[3:5], *CYCLE[:3])[i % 6] for i in range(len(errors))]
        axes[2].hist(failed, edges.tolist(), stacked=True, color=colours, label=errors)
        axes[2].set(title="Failed requests")
        axes[2].yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes[-1].set_xlabel("seconds since the start")
    legend(axes[1:])
    return figure


def distributions(runs: Sequence[Run]) -> Figure:
    """Of TTFT and TPOT: the share of completed requests below. One run has its quantiles marked."""
    figure, axes = panels(columns=2)
    for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
        lowest, highest, wide = np.inf, 0.0, False
        for i, run in enumerate(runs):
            records = completed(run.result.records)
            values = np.sort([1e3 * value for record in records if (value := getattr(record, metric)) >= 0])
            if not len(values):
                continue
            lowest, highest = min(lowest, values[0]), max(highest, values[-1])
            wide = wide or values[-1] > _WIDE * max(np.median(values), 1e-9)
            kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), _POINTS)).astype(int))
            axis.plot(
                values[kept], 100 * (kept + 1) / len(values), color=CYCLE[i % len(CYCLE)], drawstyle="steps-post",
                label=run.target,
            )  # fmt: skip
            if len(runs) == 1:
                _mark_quantiles(axis, run, metric)
        axis.set(title=f"{metric.upper()}, ms", ylabel="% of requests", ylim=(0, 103))
        if wide:
            log_scale(axis)
        elif highest > lowest:  # room for the last quantile's text
            axis.set_xlim(lowest - 0.04 * (highest - lowest), highest + 0.16 * (highest - lowest))
        draw_limit(axis, limit_of(metric, runs[0]), vertical=True)
    if len(runs) > 1:
        legend(axes)
    return figure


def _mark_quantiles(axis: "Axes", run: Run, metric: str) -> None:
    found = getattr(run.summary, f"{metric}_ms")
    for quantile, colour in QUANTILES.items():
        at = getattr(found, quantile), float(quantile[1:])
        axis.plot(*at, "o", color=colour, markersize=7, markeredgecolor=CARD)
        axis.annotate(
            f"{quantile}  {number(at[0])}", at, xytext=(9, -11), textcoords="offset points", fontsize=9, bbox=PLATE
        )


def gaps(runs: Sequence[Run]) -> Figure:
    """Histogram of the gaps between messages with tokens, on a log scale, with p50 and p99."""
    values = [
        1e3 * np.array([gap for record in completed(run.result.records) for gap in record.gaps], np.float64)
        for run in runs
    ]
    figure, (axis,) = panels()
    axis.set(title="Inter-token latency, ms", ylabel="gaps", yscale="log")
    if not any(len(each) for each in values):
        return figure
    lowest = min(float(each.min()) for each in values if len(each))
    top = max(float(np.quantile(each, 0.999)) for each in values if len(each))
    margin = max(0.1 * (top - lowest), 0.05)
    # From 0, unless all would be in few bins far from it.
    bins = np.linspace(0 if lowest < top / 2 else max(lowest - margin, 0), top + margin, 121)
    for i, (run, each) in enumerate(zip(runs, values, strict=True)):
        colour, name = CYCLE[i % len(CYCLE)], f"{run.target}: " if len(runs) > 1 else ""
        p50, p99 = (number(getattr(run.summary.itl_ms, quantile)) for quantile in ("p50", "p99"))
        counts, _ = np.histogram(np.clip(each, bins[0], bins[-1]), bins)
        axis.stairs(counts, bins, color=colour, fill=True, alpha=0.3 if len(runs) > 1 else 0.75)
        axis.stairs(counts, bins, color=colour, linewidth=1, label=f"{name}p50 {p50}, p99 {p99} ms")
    axis.set(ylim=(0.7, None), xlim=(bins[0], bins[-1]))
    if len(runs) == 1:
        for quantile, height in (("p50", 0.97), ("p99", 0.88)):
            value = getattr(runs[0].summary.itl_ms, quantile)
            axis.axvline(value, color=INK, linewidth=1.4)
            axis.annotate(
                f"{quantile}  {number(value)}", (value, height), xycoords=("data", "axes fraction"), xytext=(5, -4),
                textcoords="offset points", fontsize=9, va="top", bbox=PLATE,
            )  # fmt: skip
    else:
        legend([axis])
    draw_limit(axis, limit_of("itl", runs[0]), vertical=True)
    return figure


def waterfall(run: Run) -> Figure:
    """A bar for each request, at most 200 of them, chosen evenly: waiting, then streaming; failed ones are marked."""
    everyone = sorted(_sent(run), key=lambda record: record.sent)
    chosen = np.unique(np.linspace(0, len(everyone) - 1, min(len(everyone), _ROWS)).astype(int))
    records = [everyone[i] for i in chosen]
    figure, (axis,) = panels(height=float(np.clip(1.2 + 0.034 * len(records), 2.8, 8.0)))
    rows = np.arange(len(records))
    sent = np.array([record.sent for record in records])
    waited = np.array([_waited(record) for record in records])
    ends = np.array([_end(record) for record in records])
    axis.barh(rows, waited, left=sent, height=0.85, color=ORANGE, label="waiting for the first token")
    axis.barh(rows, ends - sent - waited, left=sent + waited, height=0.85, color=BLUE, label="streaming")
    for error, colour, label in ((True, RED, "failed"), (False, GREEN, "under way when the run ended")):
        marked = [row for row in rows if (found := records[row].error) and (found != INTERRUPTED) is error]
        if marked:
            axis.plot(ends[marked], marked, "x", color=colour, markersize=7, markeredgewidth=2, label=label)
    of = f" ({len(records)} of {len(everyone)}, evenly chosen)" if len(records) < len(everyone) else ""
    axis.set(title=f"Requests in the order of sending{of}", xlabel="seconds since the start", yticks=[])
    axis.set(ylim=(len(records) - 0.3, -0.7), xlim=(float(sent.min()), float(ends.max()) * 1.01))
    axis.grid(visible=False, axis="y")
    legend([axis])
    return figure


def _sent(run: Run) -> list[Record]:
    return [record for record in counted(run.result.records) if record.sent >= 0]


def _end(record: Record) -> float:
    return max(record.end, record.sent + (record.chunks[-1] if record.chunks else 0.0))


def _waited(record: Record) -> float:
    return record.ttft if record.chunks else _end(record) - record.sent


def _open(begins: Floats, ends: Floats, instants: Floats) -> npt.NDArray[np.int64]:
    """How many intervals are open at each instant."""
    return np.searchsorted(np.sort(begins), instants, "right") - np.searchsorted(np.sort(ends), instants, "right")
