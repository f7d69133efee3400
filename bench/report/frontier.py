"""The picture of a plan: what was tried, and what is the best for its cost."""

from collections.abc import Sequence
from pathlib import Path

from bench.replay.trials import Trial
from bench.report.style import CYCLE, GREY, INK, legend, panels


def write_frontier(
    folder: Path, trials: Sequence[Trial], best: Sequence[Trial], *, wanted: float | None, unit: str
) -> Path:
    """Writes frontier.png into the folder, which is made if it is missing. `unit`: of cost.

    Shows attainment and the share that is `wanted`, or requests a second where that is None.
    """
    figure, (axis,) = panels(height=4.2)

    def worth(one: Trial) -> float:
        return one.rate if wanted is None else 100 * one.attainment

    if wanted is not None:
        axis.axhline(100 * wanted, color=INK, linewidth=1.0, linestyle="--", label="wanted")
    axis.plot([one.cost for one in trials], [worth(one) for one in trials], "o", color=GREY, label="tried")
    costs, values = [one.cost for one in best], [worth(one) for one in best]
    axis.step(costs, values, "o-", where="post", color=CYCLE[0], label="the best for its cost")
    for one in best:
        place = one.cost, worth(one)
        axis.annotate(one.cluster, place, xytext=(6, -11), textcoords="offset points", fontsize=8.5, color=INK)
    what = "Requests/s within the objectives" if wanted is None else "Within the objectives, % of requests"
    axis.set(title=what, xlabel=unit, ylim=(0, None if wanted is None else 104))
    axis.margins(x=0.15)
    legend([axis])
    folder.mkdir(exist_ok=True)
    path = folder / "frontier.png"
    figure.savefig(path, dpi=150)
    return path
