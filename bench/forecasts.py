"""Forecasts of recorded traces against what came: `python -m bench.forecasts --folder DIR [--json FILE]`.

The arrivals of each trace are counted in windows. After each one every candidate says what comes 1, 5 and 15 minutes
later, and `planner.forecast.picked` picks one and gives its band, all from the past alone. Traces of an hour have no
day: a generated one stands in, of three days whose rate follows a sine and drifts, with bursts and an outage.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.workloads.length_traces import read_lengths
from bench.workloads.mooncake import read_mooncake
from bench.workloads.trace_time import dequantise
from planner.forecast.picked import Picked

_AHEAD = (60, 300, 900)  # seconds
_FIRST = 20  # windows before forecasts count
_RECORDED = (
    "azure2023_code.csv",
    "azure2023_conv.csv",
    "mooncake_conversation.jsonl",
    "mooncake_synthetic.jsonl",
    "sharegpt_updown_lengths.csv",
)


def arrivals(path: Path) -> NDArray[np.float64]:
    """Seconds since the first request, in order. Raises BenchError for what cannot be read."""
    if path.suffix == ".jsonl":
        stamps = np.array([request.timestamp for request in read_mooncake(path)]) / 1e3
    else:
        told = read_lengths(path).timestamps
        assert told is not None
        stamps = told
    return np.sort(dequantise(stamps - stamps.min(), 0))


def rates(times: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """Requests a second in each whole window."""
    return np.bincount((times // step).astype(np.int64))[:-1] / step


def days(step: float, seed: int = 0) -> NDArray[np.float64]:
    """Three days: 1 to 11 requests a second, a drift, ten bursts of three minutes, an hour unseen."""
    rng = np.random.default_rng(seed)
    at = np.arange(0, 3 * 86_400, step)
    rate = (6 + 5 * np.sin(2 * np.pi * at / 86_400)) * (1 + 0.1 * np.sin(at / 50_000))
    for burst in rng.integers(0, len(at), 10):
        rate[burst : burst + round(180 / step)] *= 3
    found = rng.poisson(rate * step) / step
    outage = len(at) // 2
    found[outage : outage + round(3600 / step)] = np.nan
    return found


def evaluate(values: NDArray[np.float64], step: float, quantile: float) -> list[dict[str, object]]:
    """One row for each time ahead: mean errors of all candidates and of the pick, and how often its band held."""
    series = Picked(step, 1 / step, quantile=quantile)
    names = [*series.names, "picked"]
    told = {ahead: np.full((len(values), len(names)), np.nan) for ahead in _AHEAD}
    upper = {ahead: np.full(len(values), np.nan) for ahead in _AHEAD}
    picks: dict[int, list[str]] = {ahead: [] for ahead in _AHEAD}
    seconds = 0.0
    for number, value in enumerate(values.tolist()):
        began = time.process_time()
        series.add(value, number * step)
        seconds += time.process_time() - began
        for ahead in _AHEAD:
            then = number + round(ahead / step)
            if number >= _FIRST and then < len(values):
                mean, _, high, name = series.ahead(ahead)
                told[ahead][then] = [*series.expected(round(ahead / step)), mean]
                upper[ahead][then] = high
                picks[ahead].append(name)
    rows: list[dict[str, object]] = []
    for ahead in _AHEAD:
        compared = ~np.isnan(told[ahead][:, -1]) & ~np.isnan(values)
        if not compared.any():
            continue
        came = values[compared]
        wrong = np.abs(told[ahead][compared] - came[:, None]).mean(axis=0)
        rows.append(
            {
                "ahead_s": ahead,
                "forecasts": int(compared.sum()),
                "mean_rate": float(came.mean()),
                "error": dict(zip(names, (wrong / came.mean()).tolist(), strict=True)),
                "held": float((came <= upper[ahead][compared]).mean()),
                "upper_over_came": float(upper[ahead][compared].mean() / came.mean()),
                "most_picked": max(set(picks[ahead]), key=picks[ahead].count),
                "ms_a_window": 1e3 * seconds / len(values),
            }
        )
    return rows


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the traces lie")
    parser.add_argument("--step", type=float, default=30.0, help="seconds of a window (10 for traces of minutes)")
    parser.add_argument("--quantile", type=float, default=0.9, help="of the band's upper end")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    found: dict[str, list[dict[str, object]]] = {}
    for name in _RECORDED:
        times = arrivals(options.folder / name)
        step = options.step if times[-1] > 60 * options.step else 10.0
        found[f"{Path(name).stem}, {step:g} s"] = evaluate(rates(times, step), step, options.quantile)
    found["three days, 60 s"] = evaluate(days(60.0), 60.0, options.quantile)
    print(_table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _table(found: dict[str, list[dict[str, object]]]) -> str:
    names = list(next(iter(found.values()))[0]["error"])  # type: ignore[call-overload]
    head = ["trace", "ahead", *names, "held, %", "upper / came", "most picked"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for trace, rows in found.items():
        for row in rows:
            wrong: dict[str, float] = row["error"]  # type: ignore[assignment]
            cells = [trace, f"{row['ahead_s']} s", *(f"{100 * wrong[name]:.0f}" for name in names)]
            cells += [f"{100 * row['held']:.0f}", f"{row['upper_over_came']:.2f}", str(row["most_picked"])]  # type: ignore[operator]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
