"""What `bench.tier_replay` found, as a picture: `python -m bench.tier_picture FOUND.json... --plot F.svg`.

For each trace the hit rate and the 90th percentile of TTFT over the working set, a line for each way, with `lru`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.tier_replay import WAYS

_NAMES = ("tiers off", "peers", "host memory", "host, disk", "host, disk, Redis", "all and peers")


def draw(cells: list[dict[str, Any]], file: Path) -> None:
    """`file`: .svg or .png."""
    from matplotlib import rc_context

    from bench.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, STYLE, from_zero, legend, panels

    cells = [cell for cell in cells if cell["policy"] == "lru"]
    traces = list(dict.fromkeys(cell["trace"] for cell in cells))
    sets = sorted({cell["working_set"] for cell in cells})
    with rc_context(STYLE):
        figure, axes = panels(len(traces), 2, height=6.5, sharex=True)
        for at, trace in enumerate(traces):
            hits, first = axes[at], axes[len(traces) + at]
            for way, name, colour in zip(WAYS, _NAMES, (GREY, PURPLE, BLUE, GREEN, ORANGE, RED), strict=True):
                found = {cell["working_set"]: cell for cell in cells if (cell["trace"], cell["way"]) == (trace, way)}
                where = [each for each in sets if each in found]
                style: Any = {"color": colour, "label": name, "marker": "o", "markersize": 3.5}
                hits.plot(where, [100 * found[each]["hit_rate"] for each in where], **style)
                first.plot(where, [found[each]["ttft_s"]["p90"] for each in where], **style)
            hits.set(title=trace.replace("_", " "), ylabel="hit rate, %", xscale="log")
            first.set(ylabel="TTFT p90, s", xlabel="working set, times the workers' caches")
            from_zero(hits, x=False)
            from_zero(first, x=False)
            first.set_xticks(sets, [f"{each:g}" for each in sets])
            first.minorticks_off()
        legend(axes)
        figure.savefig(file)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "found", type=Path, nargs="+", help="reports of bench.tier_replay; of a cell the last one counts"
    )
    parser.add_argument("--plot", type=Path, required=True, help="the picture (.svg or .png)")
    arguments = parser.parse_args()
    draw([cell for file in arguments.found for cell in json.loads(file.read_bytes())["replays"]], arguments.plot)


if __name__ == "__main__":
    main()
