"""How pictures and the page look: colours of both schemes, fonts, sizes, and the parts that pictures share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from bench.measure.experiment import Run
from bench.measure.slo import parse_slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of light and dark scheme. The hues are Okabe and Ito's: told apart by nearly all eyes, and in print.
THEME = {
    "ink": ("#1c2128", "#e6e9ee"),
    "axis": ("#555b66", "#9aa4b2"),
    "line": ("#e1e5ea", "#333a44"),
    "card": ("#ffffff", "#1c2128"),
    "grey": ("#8a8f98", "#7f8894"),
    "blue": ("#0072b2", "#4aa8e0"),
    "orange": ("#e69f00", "#f0b63a"),
    "green": ("#009e73", "#2fc79a"),
    "red": ("#d55e00", "#ff8a4c"),
    "purple": ("#cc79a7", "#e29ac2"),
    "sky": ("#56b4e9", "#8fd0f5"),
}
INK, AXIS, LINE, CARD, GREY, BLUE, ORANGE, GREEN, RED, PURPLE, SKY = (light for light, _ in THEME.values())
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
QUANTILES = {"p50": BLUE, "p90": ORANGE, "p99": RED}
STYLE: Any = {  # typed by matplotlib as a dict of hundreds of literals
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": AXIS,
    "axes.facecolor": CARD,
    "axes.labelcolor": AXIS,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": CARD,
}
INVALID = "invalid"  # in legends: what a run looks like whose numbers do not tell of the server
PLATE = {"boxstyle": "round,pad=0.15", "facecolor": CARD, "edgecolor": "none", "alpha": 0.85}  # under text over data
_WIDTH = 11.0  # inches
_FAR = 2.0  # lengths of an axis: limits farther from its ends are told, not drawn


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows."""

    name: str
    caption: str
    figure: Figure


def panels(columns: int = 1, rows: int = 1, height: float = 3.7, **more: Any) -> tuple[Figure, list["Axes"]]:
    """A figure of `height` inches and its axes, row by row; `more` goes to `Figure.subplots`."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)


def legend(axes: Sequence["Axes"], **place: Any) -> None:
    """One legend for all axes, above them; in one of them where `place` tells. Each label is there once."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if not found:
        return
    if INVALID in found:
        found[INVALID] = found.pop(INVALID)  # last
    if place:
        axes[0].legend(found.values(), found.keys(), **place)
    else:
        figure = axes[0].get_figure(root=True)
        assert figure is not None
        figure.legend(found.values(), found.keys(), loc="outside upper right", ncols=len(found), columnspacing=1.4)


def log_scale(axis: "Axes", vertical: bool = False) -> None:
    """A log scale of plain numbers, with ticks at 1, 2 and 5."""
    (axis.set_yscale if vertical else axis.set_xscale)("log")
    ticks = axis.yaxis if vertical else axis.xaxis
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ticks.set_major_formatter(lambda value, _: f"{value:g}")
    ticks.set_minor_formatter(NullFormatter())


def limits(run: Run) -> dict[str, float]:
    """Limits of the run's SLO in milliseconds, by name of the objective."""
    goodput = run.summary.goodput
    return {} if goodput is None else {limit.name: limit.ms for limit in parse_slo(goodput.slo).limits}


def limit_of(metric: str, run: Run) -> float | None:
    """The limit of a metric (ttft, tpot, itl) in milliseconds; of several for ITL the first. None without one."""
    return next((ms for name, ms in limits(run).items() if name.split("_")[0] == metric), None)


def from_zero(axis: "Axes", x: bool = True, y: bool = True) -> None:
    """Lets the axes begin at 0 and end somewhat above what was drawn so far."""
    if x:
        axis.set_xlim(0, 1.06 * max(axis.dataLim.x1, 0) or 1)
    if y:
        axis.set_ylim(0, 1.08 * max(axis.dataLim.y1, 0) or 1)


def draw_limit(axis: "Axes", limit: float | None, vertical: bool = False) -> None:
    """The limit in milliseconds as a dashed line with its value; only the value where a line would squeeze the data."""
    if limit is None:
        return
    text = f"SLO {limit:g} ms"
    style: Any = {"color": PURPLE, "linestyle": (0, (4, 2)), "linewidth": 1.5}
    label: Any = {"color": PURPLE, "fontsize": 9, "textcoords": "offset points", "bbox": PLATE}
    low, high = axis.get_xlim() if vertical else axis.get_ylim()
    room = _FAR * (high - low)
    if not low - room <= limit <= high + room:
        above = limit > high
        if vertical:
            shown = f"{text} →" if above else f"← {text}"
            axis.annotate(
                shown, (above, 0.22), xycoords="axes fraction", xytext=(-4 if above else 4, 0),
                ha="right" if above else "left", va="center", **label,
            )  # fmt: skip
        else:
            axis.annotate(
                f"{text} {'↑' if above else '↓'}", (0, above), xycoords="axes fraction",
                xytext=(4, -4 if above else 4), va="top" if above else "bottom", **label,
            )  # fmt: skip
    elif vertical:
        axis.axvline(limit, **style)
        axis.set_xlim(min(low, limit - 0.05 * (high - low)), max(high, limit + 0.05 * (high - low)))
        axis.annotate(
            text, (limit, 0.22), xycoords=("data", "axes fraction"), xytext=(-14, 0), rotation=90, va="center", **label
        )
    else:
        axis.axhline(limit, **style)
        axis.set_ylim(min(low, 0.9 * limit), max(high, 1.12 * limit))
        axis.annotate(text, (0, limit), xycoords=("axes fraction", "data"), xytext=(4, 5), **label)
