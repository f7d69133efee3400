"""The report: one HTML file that needs nothing else, and the same pictures as PNG."""

import io
import re
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup
from matplotlib import rc_context

from bench.measure.experiment import Experiment
from bench.measure.summary_format import Distribution
from bench.report.headlines import failures, headlines
from bench.report.plots import pictures
from bench.report.style import THEME, Picture
from bench.report.tables import metric_name, number

_DPI = 150
_KINDS = {"run": "Load test", "sweep": "Load sweep", "goodput": "Goodput search", "compare": "Comparison"}
_LATENCIES = (
    ("ttft", "TTFT", "time to first token: from sending the request to the first message with text"),
    ("tpot", "TPOT", "time per output token after the first: (last - first) / (tokens - 1)"),
    ("itl", "ITL", "each gap between messages with text"),
    ("e2e", "E2E", "from sending the request to the end of its answer"),
    ("send_lag", "send lag", "how late the load generator sent"),
    ("loop_lag", "loop lag", "how late the load generator read"),
)


def write_html(path: Path, experiment: Experiment) -> None:
    """Writes the report. Everything that came from outside is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    environment.filters["metric_name"] = metric_name
    environment.filters["interval"] = _interval
    environment.filters["settings"] = _settings
    page = environment.get_template("report.html.j2").render(
        experiment=experiment,
        kind=_KINDS[experiment.kind],
        headlines=headlines(experiment),
        failures=failures(experiment),
        latencies=_LATENCIES,
        theme=THEME,
        pictures=[(picture.name, picture.caption, _svg(picture)) for picture in pictures(experiment)],
    )
    path.write_text(page, encoding="utf-8")


def write_pngs(folder: Path, experiment: Experiment) -> list[Path]:
    """Writes each picture into the folder, which is made if it is missing; returns their paths."""
    folder.mkdir(exist_ok=True)
    written = []
    for picture in pictures(experiment):
        path = folder / f"{picture.name}.png"
        picture.figure.savefig(path, dpi=_DPI)
        written.append(path)
    return written


def _svg(picture: Picture) -> Markup:
    """The figure as an element. Ids begin with its name, as all share one page; colours are those of the scheme."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": picture.name, "svg.fonttype": "path"}):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2).replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{picture.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{picture.name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{picture.name}-", svg)
    svg = re.sub(r"(fill|stroke): (#[0-9a-f]{6})", lambda found: f"{found[1]}: {_scheme_colour(found[2])}", svg)
    return Markup(svg.replace("<svg", Markup('<svg role="img" aria-label="{}"').format(picture.caption), 1))


def _scheme_colour(colour: str) -> str:
    return next((f"var(--{name})" for name, (light, _) in THEME.items() if light == colour), colour)


def _interval(found: Distribution, statistic: str) -> str:
    bounds = found.ci95.get(statistic)
    return "" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def _settings(config: Any) -> list[tuple[str, str]]:
    """Names and values of a configuration, those of the workload among them."""
    found: list[tuple[str, str]] = []
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict) and name == "workload":
            found += [(f"workload {key}", str(each)) for key, each in value.items() if each != ""]
        elif value not in ("", None, {}):
            found.append((name, str(value)))
    return found
