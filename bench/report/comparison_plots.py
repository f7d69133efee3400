"""Pictures of a comparison of targets."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bench.measure.experiment import Experiment, Run
from bench.report.style import AXIS, CARD, CYCLE, INK, LINE, from_zero, legend, panels
from bench.report.tables import metric_name

_NARROW = 8.0  # ratios that spread over less than so many times get ticks at round numbers

_MEASURES: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    ("TTFT p50, ms", lambda run: run.summary.ttft_ms.p50),
    ("TPOT p50, ms", lambda run: run.summary.tpot_ms.p50),
    ("Output tokens per second", lambda run: run.summary.throughput.output_tokens_per_s),
    ("TTFT p99, ms", lambda run: run.summary.ttft_ms.p99),
    ("TPOT p99, ms", lambda run: run.summary.tpot_ms.p99),
    ("Requests per second", lambda run: run.summary.throughput.requests_per_s),
)


def ratio_intervals(experiment: Experiment) -> Figure:
    """Each ratio to the first target with its interval around 1, on a log scale."""
    shown = [ratio for ratio in experiment.ratios if np.isfinite(ratio.ratio) and ratio.ratio > 0]
    targets = list(dict.fromkeys(run.target for run in experiment.runs))
    others = [target for target in targets if any(ratio.target == target for ratio in shown)]
    metrics = list(dict.fromkeys(ratio.metric for ratio in shown))
    figure, (axis,) = panels(height=1.5 + 0.21 * len(metrics) * max(1.3, len(others)))
    for shaded in range(0, len(metrics), 2):
        axis.axhspan(shaded - 0.5, shaded + 0.5, color=LINE, alpha=0.5, linewidth=0)
    axis.axvline(1, color=INK, linewidth=1.2)
    for place, target in enumerate(others):
        colour = CYCLE[targets.index(target) % len(CYCLE)]
        for ratio in (ratio for ratio in shown if ratio.target == target):
            row = metrics.index(ratio.metric) + (place + 0.5) / len(others) - 0.5
            low, high = ratio.ci95
            axis.plot((low, high), (row, row), color=colour, linewidth=2.2, solid_capstyle="butt")
            clear = not low <= 1 <= high
            axis.plot(
                ratio.ratio, row, "o", color=colour if clear else CARD, markersize=6.5, markeredgecolor=colour,
                markeredgewidth=1.5,
            )  # fmt: skip
            axis.annotate(
                f"{ratio.ratio:.2f}  ({low:.2f} to {high:.2f})", (1.01, row), xycoords=("axes fraction", "data"),
                fontsize=8.5, va="center", color=INK, annotation_clip=False,
            )  # fmt: skip
        axis.plot([], [], "o-", color=colour, label=f"{target} / {targets[0]}")
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if high < _NARROW * low:
        ticks = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        axis.set_xticks([tick for tick in ticks if low <= tick <= high])
        axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_yticks(range(len(metrics)), [metric_name(metric) for metric in metrics])
    axis.set(title=f"Ratio to {targets[0]}", ylim=(len(metrics) - 0.5, -0.5))
    axis.set_xlabel("below 1: less.  Latencies: less is better; throughput: more is better")
    axis.tick_params(axis="y", length=0, labelcolor=AXIS)
    axis.grid(visible=False, axis="y")
    legend([axis])
    return figure


def compared_metrics(experiment: Experiment) -> Figure:
    """Bars of each target's median over rounds, with a dot for each round."""
    figure, axes = panels(columns=3, rows=2, height=5.6)
    targets = list(dict.fromkeys(run.target for run in experiment.runs))
    for axis, (title, measure) in zip(axes, _MEASURES, strict=True):
        for place, target in enumerate(targets):
            values = [value for run in experiment.runs if run.target == target if (value := measure(run)) is not None]
            if not values:
                continue
            colour = CYCLE[place % len(CYCLE)]
            axis.bar(place, float(np.median(values)), width=0.62, color=colour, alpha=0.3)
            spread = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
            axis.plot(place + spread, values, "o", color=colour, markersize=6.5, markeredgecolor=CARD)
        from_zero(axis, x=False)
        axis.set(title=title, xlim=(-0.6, len(targets) - 0.4))
        axis.set_xticks(range(len(targets)), targets)
        axis.grid(visible=False, axis="x")
    return figure
