"""What a command leaves behind: tables on the terminal, files that the flags name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from bench.errors import BenchError
from bench.measure.experiment import Experiment
from bench.measure.record_files import require_ending, write_records
from bench.options import Options
from bench.report.tables import print_ratios, print_steps, print_summary


def show(experiment: Experiment, console: Console) -> None:
    """Prints the tables of the experiment."""
    if experiment.kind == "run":
        for run in experiment.runs:
            print_summary(console, run)
        return
    print_steps(console, experiment)
    if experiment.kind == "compare":
        print_ratios(console, experiment)


def require_writable(options: Options) -> None:
    """Finds out before the load whether its results can be written. Raises BenchError."""
    for path in (options.json, options.records, options.report, options.plots):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"there is no folder {path.absolute().parent} to write {path.name} into")
        if path is not None and path.exists() and path.is_dir() is not (path is options.plots):
            raise BenchError(f"{path} is {'a' if path.is_dir() else 'no'} folder")
        if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise BenchError(f"{path} cannot be written")
    if options.records is not None:
        require_ending(options.records)
    if options.report is not None or options.plots is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise BenchError("pictures need matplotlib: pip install 'tandem-serve[bench]'") from error


def write(experiment: Experiment, options: Options, console: Console) -> None:
    """Writes the files that were asked for and says so. Raises BenchError where one cannot be written."""
    with written():
        _write(experiment, options, console)


@contextmanager
def written() -> Iterator[None]:
    """Files are: an error of the system becomes a BenchError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise BenchError(f"the results cannot be written: {where}{error.strerror}") from error


def _write(experiment: Experiment, options: Options, console: Console) -> None:
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(to_json(experiment), indent=2) + b"\n")
        console.print(f"summary: {options.json}", highlight=False)
    if options.records is not None:
        for number, run in enumerate(experiment.runs):
            path = _numbered(options.records, number if len(experiment.runs) > 1 else None)
            write_records(path, run.result.records)
            console.print(f"records: {path}", highlight=False)
    if options.report is not None:
        from bench.report.html import write_html

        write_html(options.report, experiment)
        console.print(f"report: {options.report}", highlight=False)
    if options.plots is not None:
        from bench.report.html import write_pngs

        for path in write_pngs(options.plots, experiment):
            console.print(f"picture: {path}", highlight=False)


def to_json(experiment: Experiment) -> bytes:
    """The summary of a run; of the other commands, all summaries and what was found, as docs/bench.md defines."""
    if experiment.kind == "run":
        return msgspec.json.encode(experiment.runs[0].summary)
    runs = [
        {"label": run.label, "target": run.target, "load": run.load} | msgspec.to_builtins(run.summary)
        for run in experiment.runs
    ]
    found: dict[str, object] = {"kind": experiment.kind, "title": experiment.title, "axis": experiment.axis}
    found |= {
        "runs": runs,
        "search": experiment.search,
        "ratios": experiment.ratios,
        "stopped_because": experiment.stopped_because,
    }
    return msgspec.json.encode(found)


def _numbered(path: Path, number: int | None) -> Path:
    return path if number is None else path.with_stem(f"{path.stem}-{number}")
