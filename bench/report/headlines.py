"""What a reader should see first: the few numbers that an experiment is about, and what went wrong."""

from typing import NamedTuple

from bench.measure.experiment import Experiment, Run
from bench.report.tables import metric_name, number

_COMPARED = ("ttft_ms p50", "tpot_ms p50", "throughput output_tokens_per_s")


class Headline(NamedTuple):
    """A number with its unit, and what it is."""

    value: str
    meaning: str


class Failures(NamedTuple):
    """Requests that failed in one way."""

    kind: str
    requests: int
    runs: list[str]  # labels
    example: str  # what the server or the system said


def headlines(experiment: Experiment) -> list[Headline]:
    """The numbers that the experiment is about."""
    match experiment.kind:
        case "goodput":
            return _of_search(experiment)
        case "sweep":
            return _of_sweep(experiment)
        case "compare":
            return _of_comparison(experiment)
    return _of_run(experiment.runs[0])


def failures(experiment: Experiment) -> list[Failures]:
    """Failed requests of all runs by kind, the most frequent first."""
    kinds = {kind for run in experiment.runs for kind in run.summary.errors}
    found = []
    for kind in kinds:
        runs = [run for run in experiment.runs if kind in run.summary.errors]
        count = sum(run.summary.errors[kind] for run in runs)
        example = next((text for run in runs if (text := run.summary.error_examples.get(kind))), "")
        found.append(Failures(kind, count, [run.label for run in runs], example))
    return sorted(found, key=lambda each: (-each.requests, each.kind))


def _of_run(run: Run) -> list[Headline]:
    summary = run.summary
    found = [
        Headline(f"{number(summary.ttft_ms.p50)} ms", "TTFT, median"),
        Headline(f"{number(summary.tpot_ms.p50)} ms", "TPOT, median"),
        Headline(f"{number(summary.itl_ms.p99)} ms", "ITL, p99"),
        Headline(number(summary.throughput.output_tokens_per_s), "output tokens per second"),
        Headline(number(summary.throughput.requests_per_s), "requests per second"),
        Headline(f"{summary.completed} of {summary.requests}", "requests completed"),
    ]
    if (goodput := summary.goodput) is not None:
        found.append(Headline(f"{100 * goodput.attainment:.1f} %", f"met {goodput.slo.replace(',', ', ')}"))
    return found


def _of_search(experiment: Experiment) -> list[Headline]:
    search = experiment.search
    if search is None:
        return []
    found = "the highest rate" if search.finished else "not finished; so far the highest rate"
    failed = "none" if search.failed_rate is None else number(search.failed_rate)
    return [
        Headline(
            number(search.rate),
            f"a second: {found} at which {100 * search.attainment:.4g} % met the SLO",
        ),
        Headline(number(search.goodput), "requests that met the SLO per second, at that rate"),
        Headline(failed, "a second: the lowest rate that did not hold"),
    ]


def _of_sweep(experiment: Experiment) -> list[Headline]:
    fastest = max(experiment.runs, key=lambda run: run.summary.throughput.output_tokens_per_s)
    found = [
        Headline(
            number(fastest.summary.throughput.output_tokens_per_s), f"output tokens per second, at {fastest.label}"
        )
    ]
    for name, metric in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        known = [
            (value, run.label) for run in experiment.runs if (value := getattr(run.summary, metric).p50) is not None
        ]
        for (value, label), word in ((min(known), "lowest"), (max(known), "highest")) if known else ():
            found.append(Headline(f"{number(value)} ms", f"{name} median, the {word}: at {label}"))
    met = [(goodput.requests_per_s, run.label) for run in experiment.runs if (goodput := run.summary.goodput)]
    if met:
        found.append(Headline(number(max(met)[0]), f"requests that met the SLO per second, at {max(met)[1]}"))
    return found


def _of_comparison(experiment: Experiment) -> list[Headline]:
    base = experiment.runs[0].target
    return [
        Headline(
            f"{ratio.ratio:.2f} ×",
            f"{metric_name(ratio.metric)} of {ratio.target} over {base}; {ratio.ci95[0]:.2f} to {ratio.ci95[1]:.2f}",
        )
        for ratio in experiment.ratios
        if ratio.metric in _COMPARED
    ]
