"""A ladder of loads: how latency and throughput change with the rate or the concurrency."""

import asyncio
import re

import msgspec
import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Experiment, Probe, Run

INTERRUPTED = "interrupted"  # `Experiment.stopped_because` after Ctrl-C
_FORM = "write 1,2,4 or 1-16x2 (times two) or 2-10+2 (by two)"
_MOST_STEPS = 100
_SATURATING = 64  # conversations in flight that keep any server busy
_WAVES = 4  # times that each of them asks, at least, so that beginning and end weigh little
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_ladder(text: str) -> list[float]:
    """Loads of "1,2,4", "1-16x2" (geometric) or "2-10+2" (arithmetic), as they are run. Raises BenchError."""
    match = re.fullmatch(rf"{_NUMBER}-{_NUMBER}([x+]){_NUMBER}", text.replace(" ", ""))
    try:
        loads = [float(part) for part in text.split(",")] if match is None else _spread(*match.groups())
    except ValueError as error:
        raise BenchError(f"{text!r} is no ladder of loads: {error}; {_FORM}") from error
    if not all(0 < load < float("inf") for load in loads):
        raise BenchError(f"{text!r} is no ladder of loads: each must be above 0; {_FORM}")
    return loads


def _spread(first: str, last: str, kind: str, step: str) -> list[float]:
    start, end, by = float(first), float(last), float(step)
    if start <= 0 or end < start:
        raise ValueError("it must begin above 0 and not end below its beginning")
    if by <= (1 if kind == "x" else 0):
        raise ValueError("it must rise")
    loads: list[float] = []
    load = start
    while load <= end * (1 + 1e-9):  # a little more than the end, because tenths are not exact
        if len(loads) == _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS} steps")
        loads.append(float(f"{load:.12g}"))
        load = load * by if kind == "x" else load + by
    return loads


def at_load(base: LoadConfig, load: float, axis: str = "rate") -> LoadConfig:
    """`base` at a rate (open loop) or concurrency (closed loop). Raises BenchError where it cannot be set.

    A trace comes at the asked rate instead of its timestamps, with Poisson arrivals.
    """
    if axis == "concurrency":
        if load != int(load):
            raise BenchError(f"a concurrency of {load:g} is no whole number")
        return msgspec.structs.replace(base, concurrency=int(load), rate=None)
    if base.arrival == "ramp":
        raise BenchError("a ramp has no one rate: use it with `tandem bench run`, or choose another --arrival")
    arrival = "poisson" if base.arrival == "trace" else base.arrival
    return msgspec.structs.replace(base, rate=load, concurrency=None, arrival=arrival)


async def auto_ladder(base: LoadConfig, steps: int, probe: Probe) -> list[float]:
    """Rates from 10 % to 100 % of the highest one that the server keeps up with, found in a closed loop.

    The rate is that of conversations, as --rate is. Raises BenchError when nothing was completed.
    """
    # The seed after those of the steps, so that their prompts are not in the server's cache.
    config = msgspec.structs.replace(at_load(base, _SATURATING, "concurrency"), seed=base.seed + steps)
    if base.num_requests is not None:
        config = msgspec.structs.replace(config, num_requests=max(base.num_requests, _WAVES * _SATURATING))
    run = await probe(config, f"{_SATURATING} at once, to find the highest rate")
    summary = run.summary
    if summary.interrupted:
        raise BenchError("interrupted while the highest rate was looked for: there is nothing to report")
    if not summary.completed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.errors.items()) or "no request was counted"
        raise BenchError(f"no request was completed at {_SATURATING} at once ({kinds}); give a ladder with --rate")
    counted = [record for record in run.result.records if not record.warmup]
    requests_each = len(counted) / len({record.conversation for record in counted})
    highest = summary.throughput.requests_per_s / requests_each
    return [float(f"{highest * share:.3g}") for share in np.linspace(0.1, 1.0, steps)]


async def sweep_loads(
    base: LoadConfig, loads: list[float], axis: str, probe: Probe, stop: asyncio.Event | None = None
) -> Experiment:
    """One run for each load, each with a seed of its own; sorted by load in the Experiment.

    With one seed for all, later steps would ask what earlier ones have left in the server's prefix cache.

    Ends early when `stop` is set or a run cannot be made, and keeps what it has. Raises BenchError when it has nothing.
    """
    steps = [
        (load, msgspec.structs.replace(at_load(base, load, axis), seed=base.seed + number))
        for number, load in enumerate(loads)
    ]
    runs: list[Run] = []
    stopped_because = ""
    for load, config in steps:
        try:
            run = await probe(config, f"{load:g} {'req/s' if axis == 'rate' else 'at once'}")
        except BenchError as error:
            if not runs:
                raise
            stopped_because = str(error)
            break
        runs.append(msgspec.structs.replace(run, load=load))
        if stop is not None and stop.is_set():
            stopped_because = INTERRUPTED
            break
    return Experiment(
        kind="sweep",
        title=f"{runs[0].config.model}: {base.workload.name} by {axis}",
        runs=sorted(runs, key=lambda run: run.load or 0.0),
        axis=axis,
        stopped_because=stopped_because,
    )
