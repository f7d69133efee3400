"""Reports: pictures, one file that opens offline, a real browser that shows it."""

import functools
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.image
import msgspec
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich.console import Console

from bench.config import LoadConfig
from bench.load.coordinator import LiveState
from bench.measure.experiment import Experiment, Run, Search
from bench.measure.ratios import ratios
from bench.measure.record import LagSamples, Record, RunResult
from bench.measure.slo import parse_slo
from bench.measure.summary import summarise
from bench.report.headlines import failures
from bench.report.html import write_html, write_pngs
from bench.report.live import LiveView
from bench.report.plots import pictures
from bench.report.style import BLUE, CARD, GREEN, ORANGE, THEME
from bench.report.tables import print_ratios, print_steps, print_summary

SLO = "ttft=120ms,tpot=25ms,itl_p99=60ms"
pytestmark = pytest.mark.filterwarnings("error:.*constrained_layout")  # matplotlib warns of what it cannot lay out
HOSTILE = '<script>alert("x")</script><img src=http://example.com/x.png>'


def run(
    label: str = "one", load: float | None = None, target: str = "", seed: int = 0, failing: int = 2, slo: str = SLO
) -> Run:
    rng = np.random.default_rng(seed)
    records = []
    for i in range(60):
        gaps = rng.gamma(20, 0.001, 30)
        chunks = (rng.gamma(10, 0.01) + np.cumsum(gaps)).tolist()
        sent = i * 0.1
        record = Record(id=i, scheduled=sent, sent=sent, end=sent + chunks[-1], chunks=chunks, status=200)
        record.prompt_tokens = record.input_tokens = 100
        record.completion_tokens = record.output_tokens = 30
        if i < failing:
            record.error, record.detail = "http_500", HOSTILE
        records.append(record)
    config = LoadConfig(url="http://127.0.0.1:1", model="m<b>", rate=load)
    lag = LagSamples(send=rng.gamma(2, 0.1, 60).tolist(), loop=rng.gamma(2, 0.1, 60).tolist())
    result = RunResult(started_at=0.0, wall_seconds=8.0, records=records, lag=lag)
    summary = summarise(config, result, parse_slo(slo) if slo else None)
    return Run(label=label, load=load, target=target, config=config, result=result, summary=summary)


def goodput() -> Experiment:
    runs = [run(f"{load} req/s", load, seed=load) for load in (1, 2, 4)]
    search = Search(attainment=0.9, rate=2.0, failed_rate=4.0, goodput=1.9)
    return Experiment(kind="goodput", title="a search", runs=runs, search=search)


def sweep() -> Experiment:
    """Without an SLO; the last run is not valid and completed nothing."""
    runs = [run(f"{load} at once", load, seed=load, slo="") for load in (1, 2)] + [
        run("4 at once", 4, failing=60, slo="")
    ]
    return Experiment(kind="sweep", title="a sweep", axis="concurrency", runs=runs)


def comparison() -> Experiment:
    runs = [run(f"{t}, round {r}", target=t, seed=r + 10 * (t == "b"), failing=0) for r in (1, 2) for t in ("a", "b")]
    a, b = ([each for each in runs if each.target == target] for target in ("a", "b"))
    return Experiment(kind="compare", title="b against a", runs=runs, ratios=ratios(a, b, "b"))


EXPERIMENTS = {
    "run": lambda: Experiment(kind="run", title="a run", runs=[run()]),
    "sweep": sweep,
    "goodput": goodput,
    "compare": comparison,
}


@functools.cache
def page(kind: str) -> str:
    """The report of an experiment. Seconds to draw, so that tests share it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        write_html(path, EXPERIMENTS[kind]())
        return path.read_text()


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_every_picture_shows_something(kind: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[kind]()
    written = write_pngs(tmp_path / "p", experiment)
    assert [path.stem for path in written] == [picture.name for picture in pictures(experiment)]
    expected = {
        "run": {"timeline", "waterfall"},
        "sweep": {"latency", "throughput", "timeline", "waterfall"},
        "goodput": {"latency", "throughput", "attainment", "timeline", "waterfall"},
        "compare": {"ratios", "targets", "timeline-1", "timeline-2", "waterfall-1", "waterfall-2"},
    }
    assert {path.stem for path in written} == {"distribution", "itl"} | expected[kind]
    for path in written:
        pixels = matplotlib.image.imread(path)[..., :3]
        assert pixels.shape[1] > 1000 and any(count(pixels, colour) > 200 for colour in (BLUE, GREEN, ORANGE)), path


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_the_report_needs_nothing_else_and_trusts_nobody(kind: str) -> None:
    text = page(kind)
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*|@import|url\((?!#)""", text) == []
    assert "<script" not in text and "m<b>" not in text
    assert kind == "compare" or "&lt;script&gt;" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_rate_that_held_is_the_one_shown_in_detail() -> None:
    captions = {picture.name: picture.caption for picture in pictures(goodput())}
    assert captions["waterfall"].startswith("2 req/s: ")


@pytest.mark.parametrize(
    ("changes", "is_there"),
    [
        ({}, {"distribution", "itl", "timeline", "waterfall"}),
        ({"chunks": [0.01], "completion_tokens": 1}, {"distribution", "itl", "timeline", "waterfall"}),
        ({"chunks": [0.5, 0.53, 0.56], "completion_tokens": 3}, {"distribution", "itl", "timeline", "waterfall"}),
        ({"error": "interrupted", "detail": "", "end": -1.0}, set()),
    ],
)
def test_odd_runs_have_pictures_too(changes: dict[str, Any], is_there: set[str], tmp_path: Path) -> None:
    whole = run(failing=0)
    records = [msgspec.structs.replace(record, **changes) for record in whole.result.records[:1]]
    result = msgspec.structs.replace(whole.result, records=records)
    odd = Run(label="odd", config=whole.config, result=result, summary=summarise(whole.config, result, parse_slo(SLO)))
    for experiment in (
        Experiment(kind="run", title="odd", runs=[odd]),
        Experiment(kind="sweep", title="odd", runs=[msgspec.structs.replace(odd, load=1.0)]),
        Experiment(kind="compare", title="odd", runs=[msgspec.structs.replace(odd, target="a")]),
    ):
        write_html(tmp_path / "odd.html", experiment)
        drawn = set(re.findall(r'<figure id="([^"]+)"', (tmp_path / "odd.html").read_text()))
        assert drawn & {"distribution", "itl", "timeline", "waterfall"} == is_there


def test_narrow_latencies_far_from_their_limits_are_drawn_in_full() -> None:
    """A server with fixed delays: the limit is far to the left of all values, and no curve lies on the frame."""
    whole = run("1 req/s", 1.0, failing=0)
    for i, record in enumerate(whole.result.records):
        record.chunks = [0.0500 + 0.05 * k * (1 + 1e-5 * i) for k in range(1, 31)]
    summary = summarise(whole.config, whole.result, parse_slo("ttft=9ms,tpot=9ms,itl_p99=9ms"))
    experiment = Experiment(kind="sweep", title="", runs=[msgspec.structs.replace(whole, summary=summary)])
    drawn = {picture.name: picture.figure for picture in pictures(experiment)}
    for name in ("distribution", "itl", "latency", "throughput"):
        drawn[name].canvas.draw()
    for axis in [*drawn["latency"].axes, drawn["throughput"].axes[2], *drawn["distribution"].axes]:
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        for line in axis.lines:
            xs, ys = (np.asarray(values, float) for values in line.get_data())
            if line.get_linestyle() == "-" and len(xs):
                assert left <= xs.min() and xs.max() < right and bottom <= ys.min() and ys.max() < top
    assert "← SLO 9 ms" in [text.get_text() for text in drawn["distribution"].axes[1].texts]


def test_a_waterfall_says_how_many_of_its_requests_it_shows() -> None:
    few, many = run(failing=0), run(failing=0)
    many.result.records *= 5
    for one, title in ((few, "Requests in the order of sending"), (many, "(200 of 300, evenly chosen)")):
        (axis,) = figure("waterfall", Experiment(kind="run", title="", runs=[one])).axes
        assert axis.get_title(loc="left").endswith(title)
        assert len(axis.patches) == 2 * min(200, len(one.result.records))


def test_the_timeline_counts_what_is_under_way() -> None:
    """Three requests at 0, 1 and 2 s; each waits for 2 s, then streams two messages of two tokens, 1 s apart."""
    whole = run(failing=0)
    records = [
        Record(id=i, scheduled=i, sent=i, end=i + 3.0, chunks=[2.0, 3.0], status=200, completion_tokens=4)
        for i in range(3)
    ]
    result = msgspec.structs.replace(whole.result, records=records)
    short = Run(label="short", config=whole.config, result=result, summary=summarise(whole.config, result))
    output, under_way = figure("timeline", Experiment(kind="run", title="", runs=[short])).axes
    rates, edges = output.patches[0].get_data()[:2]
    assert float(np.sum(rates * np.diff(edges))) == pytest.approx(12)
    seconds, in_flight = under_way.lines[0].get_data()
    at = {second: in_flight[np.searchsorted(seconds, second)] for second in (0.5, 1.5, 2.5, 3.5, 4.5)}
    assert at == {0.5: 1, 1.5: 2, 2.5: 3, 3.5: 2, 4.5: 1}


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_browser_shows_it(kind: str, tmp_path: Path) -> None:
    pixels = screenshot(kind, tmp_path)
    # Plots in several places down the page: bands of 400 pixels with a good deal of their colours.
    bands = [pixels[top : top + 400] for top in range(0, len(pixels), 400)]
    drawn = [band for band in bands if sum(count(band, colour) for colour in (BLUE, GREEN, ORANGE)) > 400]
    assert len(drawn) >= 3


def test_in_a_dark_scheme_pictures_are_dark_too(tmp_path: Path) -> None:
    pixels = screenshot("run", tmp_path, "--blink-settings=preferredColorScheme=0")
    dark = {name: colour for name, (_, colour) in THEME.items()}
    assert count(pixels, CARD) < 1000
    assert count(pixels, dark["card"]) > 500_000
    assert count(pixels, dark["blue"]) > 5000


def screenshot(kind: str, tmp_path: Path, *more: str) -> np.ndarray:
    """The report as a browser shows it, without the alpha channel."""
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    path.write_text(page(kind))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars --window-size=1200,4800"
    places = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", path.as_uri()]
    command = ["timeout", "90", "chromium", *flags.split(), *more, *places]
    subprocess.run(command, capture_output=True, timeout=100, check=True)
    return matplotlib.image.imread(shot)[..., :3]


def figure(name: str, experiment: Experiment) -> Figure:
    return next(picture.figure for picture in pictures(experiment) if picture.name == name)


def count(pixels: np.ndarray, colour: str) -> int:
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.03).sum())


def shown(draw: Any, *what: Any, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    draw(console, *what)
    return console.export_text()


def test_tables_tell_what_went_wrong() -> None:
    one = run()
    one.summary.valid, one.summary.invalid_because = False, ["the send lag p99 is 99 ms"]
    text = shown(print_summary, one)
    assert "INVALID" in text and "99 ms" in text and "2 failed: http_500" in text and HOSTILE in text
    assert "send lag" in text and "58 of 60 completed" in text and "goodput" in text
    steps = shown(print_steps, Experiment(kind="sweep", title="t", runs=[one]))
    assert "INVALID" in steps and "send lag 0." in steps and "loop lag 0." in steps


def test_steps_are_legible_at_any_width() -> None:
    for width, heads in ((80, 2), (160, 1)):
        lines = shown(print_steps, goodput(), width=width).splitlines()
        tables = [line.split() for line in lines if line.split()[:1] == ["run"]]
        assert len(tables) == heads
        names = " ".join(" ".join(table) for table in tables)
        for name in ("requests", "failed", "TTFT p50/90/99", "TPOT p50/90/99", "ITL p99", "tokens/s", "goodput/s"):
            assert name in names
        assert len([line for line in lines if line.strip().startswith("4 req/s")]) == heads and "…" not in "".join(
            lines
        )


def test_tables_of_ratios_and_searches() -> None:
    assert "TTFT p50" in shown(print_ratios, comparison())
    assert "2 requests a second" in shown(print_steps, goodput()).replace("\n", " ")


def test_failures_are_told_by_kind_with_their_runs() -> None:
    found = failures(goodput())
    assert [(each.kind, each.requests, each.example) for each in found] == [("http_500", 6, HOSTILE)]
    assert found[0].runs == ["1 req/s", "2 req/s", "4 req/s"]


def test_the_report_says_what_is_not_valid(tmp_path: Path) -> None:
    assert "INVALID" not in page("goodput")
    experiment = goodput()
    bad = experiment.runs[1].summary
    bad.valid, bad.invalid_because = False, ["the send lag p99 is <99> ms"]
    write_html(tmp_path / "r.html", experiment)
    text = (tmp_path / "r.html").read_text()
    assert "<strong>INVALID</strong>: 1 of 3 runs" in text and "2 req/s: the send lag p99 is &lt;99&gt; ms" in text
    assert "invalid" in [text.get_text() for text in figure("latency", experiment).legends[0].get_texts()]


def test_the_live_view_draws_on_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, _environ={"TERM": "xterm"})
    with LiveView(console, "a load", 40, None) as view:
        view.update(STATE)
        view.update(msgspec.structs.replace(STATE, done=20))
    shown = screen.getvalue()
    assert "a load" in shown and "50%" in shown and "12.5/20.0 ms" in shown and "2 http_503" in shown


def test_the_live_view_writes_a_line_every_five_seconds_elsewhere() -> None:
    screen = io.StringIO()
    with LiveView(Console(file=screen, width=80), "a load", 40, None) as view:
        for tenths in range(120):
            view.update(msgspec.structs.replace(STATE, elapsed=tenths / 10))
    title, *lines = screen.getvalue().splitlines()
    assert title == "a load" and [line.split(" s:")[0] for line in lines] == ["  5", "  10"]
    assert "in flight 7" in lines[0] and "TTFT p50/p90 12.5/20.0 ms" in lines[0] and "2 http_503" in lines[0]


STATE = LiveState(
    elapsed=1.0, sent=19, in_flight=7, done=10, errors={"http_503": 2}, request_rate=2.0, output_rate=30.0,
    ttft_p50=12.5, ttft_p90=20.0,
)  # fmt: skip


def test_nothing_completed_still_makes_a_report(tmp_path: Path) -> None:
    one = run(failing=60)
    experiment = Experiment(kind="run", title="all failed", runs=[one])
    write_html(tmp_path / "r.html", experiment)
    assert "No request was completed" in (tmp_path / "r.html").read_text()
    assert "60 failed" in shown(print_summary, one)


def test_the_summary_survives_json() -> None:
    summary = run().summary
    assert msgspec.json.decode(msgspec.json.encode(summary), type=type(summary)) == summary


def test_without_matplotlib_the_command_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "run", "--report", str(tmp_path / "r.html")],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1 and "tandem-serve[bench]" in done.stderr
