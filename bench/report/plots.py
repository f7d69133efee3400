"""Which pictures an experiment has."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.measure.experiment import Experiment, Run
from bench.measure.summary import completed
from bench.report.comparison_plots import compared_metrics, ratio_intervals
from bench.report.load_plots import attainment, latency, throughput
from bench.report.run_plots import distributions, gaps, timeline, waterfall
from bench.report.style import STYLE, Picture

Drawing = tuple[str, str, Callable[[], Figure]]


def pictures(experiment: Experiment) -> list[Picture]:
    """All pictures of an experiment.

    Requests in detail are shown of one run: of the highest rate that held, else the last; comparisons show the last
    run of each target.
    """
    drawings = {"sweep": _of_loads, "goodput": _of_loads, "compare": _of_targets}.get(experiment.kind, _of_nothing)
    with rc_context(STYLE):
        return [
            Picture(name, caption, draw())
            for name, caption, draw in [*drawings(experiment), *_details(_shown_in_detail(experiment))]
        ]


def _of_nothing(experiment: Experiment) -> list[Drawing]:
    return []


def _of_loads(experiment: Experiment) -> list[Drawing]:
    found: list[Drawing] = [
        ("latency", "Latency against load. Bands are 95 % intervals.", partial(latency, experiment)),
        (
            "throughput",
            "Throughput against load, and what a token costs at that throughput; numbers are loads.",
            partial(throughput, experiment),
        ),
    ]
    if any(run.summary.goodput is not None for run in experiment.runs):
        caption = "Share of requests that met the SLO; failed ones did not. The band is a 95 % interval."
        found.insert(0, ("attainment", caption, partial(attainment, experiment)))
    return found


def _of_targets(experiment: Experiment) -> list[Drawing]:
    found: list[Drawing] = []
    if experiment.ratios:
        caption = "Ratios with 95 % intervals. Filled: the interval excludes 1."
        found.append(("ratios", caption, partial(ratio_intervals, experiment)))
    caption = "Each dot is a round, in the order of the rounds; bars are their medians."
    return [*found, ("targets", caption, partial(compared_metrics, experiment))]


def _shown_in_detail(experiment: Experiment) -> list[Run]:
    runs = [run for run in experiment.runs if completed(run.result.records)]
    if experiment.kind == "compare":
        return list({run.target: run for run in runs}.values())
    held = [run for run in runs if experiment.search is not None and run.load == experiment.search.rate]
    return (held or runs)[-1:]


def _details(runs: Sequence[Run]) -> list[Drawing]:
    if not runs:
        return []
    together = "; ".join(run.label for run in runs)
    found: list[Drawing] = [
        ("distribution", f"{together}: share of completed requests below a latency.", partial(distributions, runs)),
        (
            "itl",
            f"{together}: inter-token latency. The last bin holds all longer gaps; the count is on a log scale.",
            partial(gaps, runs),
        ),
    ]
    for number, run in enumerate(runs, 1):
        of = f"-{number}" if len(runs) > 1 else ""
        found += [
            (f"timeline{of}", f"{run.label}: what the server did over time.", partial(timeline, run)),
            (
                f"waterfall{of}",
                f"{run.label}: each bar is a request, from sending to the end of its answer.",
                partial(waterfall, run),
            ),
        ]
    return found
