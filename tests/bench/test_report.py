"""Reports: pictures, one file that opens offline, a real browser that shows it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import msgspec
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from bench.config import LoadConfig
from bench.measure.experiment import Experiment, Run, Search
from bench.measure.ratios import ratios
from bench.measure.record import LagSamples, Record, RunResult
from bench.measure.slo import parse_slo
from bench.measure.summary import summarise
from bench.report.html import write_html, write_pngs
from bench.report.plots import BLUE, GREEN, ORANGE, pictures
from bench.report.tables import print_ratios, print_steps, print_summary

SLO = "ttft=120ms,tpot=25ms,itl_p99=60ms"
HOSTILE = '<script>alert("x")</script><img src=http://example.com/x.png>'


def run(label: str = "one", load: float | None = None, target: str = "", seed: int = 0, failing: int = 2) -> Run:
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
    summary = summarise(config, result, parse_slo(SLO))
    return Run(label=label, load=load, target=target, config=config, result=result, summary=summary)


def sweep() -> Experiment:
    runs = [run(f"{load} req/s", load, seed=load) for load in (1, 2, 4)]
    search = Search(attainment=0.9, rate=2.0, failed_rate=4.0, goodput=1.9)
    return Experiment(kind="goodput", title="a search", runs=runs, search=search)


def comparison() -> Experiment:
    runs = [run(f"{t}, round {r}", target=t, seed=r + 10 * (t == "b"), failing=0) for r in (1, 2) for t in ("a", "b")]
    a, b = ([each for each in runs if each.target == target] for target in ("a", "b"))
    return Experiment(kind="compare", title="b against a", runs=runs, ratios=ratios(a, b, "b"))


EXPERIMENTS = {
    "run": lambda: Experiment(kind="run", title="a run", runs=[run()]),
    "goodput": sweep,
    "compare": comparison,
}


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_every_picture_shows_something(kind: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[kind]()
    written = write_pngs(tmp_path / "p", experiment)
    assert [path.stem for path in written] == [picture.name for picture in pictures(experiment)]
    assert {"timeline", "itl", "waterfall", "distribution"} <= {path.stem for path in written}
    assert kind != "goodput" or {"latency", "throughput", "attainment"} <= {path.stem for path in written}
    for path in written:
        pixels = matplotlib.image.imread(path)[..., :3]
        assert pixels.shape[1] > 1000 and any(count(pixels, colour) > 200 for colour in (BLUE, GREEN, ORANGE)), path


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_the_report_needs_nothing_else_and_trusts_nobody(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(path, EXPERIMENTS[kind]())
    page = path.read_text()
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*|@import|url\((?!#)""", page) == []
    assert "<script" not in page and "m<b>" not in page
    assert kind == "compare" or "&lt;script&gt;" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_browser_shows_it(kind: str, tmp_path: Path) -> None:
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    write_html(path, EXPERIMENTS[kind]())
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars --window-size=1200,4800"
    places = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", path.as_uri()]
    subprocess.run(["chromium", *flags.split(), *places], capture_output=True, timeout=90, check=True)
    pixels = matplotlib.image.imread(shot)[..., :3]
    # Plots in several places down the page: bands of 400 pixels with a good deal of their colours.
    bands = [pixels[top : top + 400] for top in range(0, len(pixels), 400)]
    drawn = [band for band in bands if sum(count(band, colour) for colour in (BLUE, GREEN, ORANGE)) > 400]
    assert len(drawn) >= 3


def count(pixels: np.ndarray, colour: str) -> int:
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.03).sum())


def shown(draw: Any, *what: Any) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    draw(console, *what)
    return console.export_text()


def test_tables_tell_what_went_wrong() -> None:
    one = run()
    one.summary.valid, one.summary.invalid_because = False, ["the send lag p99 is 99 ms"]
    text = shown(print_summary, one)
    assert "NOT VALID" in text and "99 ms" in text and "2 failed: http_500" in text and HOSTILE in text
    assert "send lag" in text and "58 of 60 completed" in text and "goodput" in text
    steps = shown(print_steps, Experiment(kind="sweep", title="t", runs=[one]))
    assert "NOT VALID" in steps and "2 failed" in steps


def test_tables_of_ratios_and_searches() -> None:
    assert "ttft_ms p50" in shown(print_ratios, comparison())
    assert "2 requests a second" in shown(print_steps, sweep()).replace("\n", " ")


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
