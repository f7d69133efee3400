"""Runs that belong together: what the four commands produce and what reports show."""

from collections.abc import Awaitable, Callable

import msgspec

from bench.config import LoadConfig
from bench.measure.record import RunResult
from bench.measure.summary_format import Summary


class Run(msgspec.Struct, kw_only=True):
    """One load run and what it came to."""

    label: str  # in tables and legends: "2 req/s", "tandem", "tandem, round 1"
    target: str = ""  # compare: name of the target
    load: float | None = None  # sweep and goodput: the rate or concurrency of this step
    config: LoadConfig
    result: RunResult
    summary: Summary


Probe = Callable[[LoadConfig, str], Awaitable[Run]]  # carries out one load; the text is the run's label


class Ratio(msgspec.Struct, kw_only=True):
    """One metric of a target over the same metric of the first target, with a 95 % bootstrap interval."""

    target: str
    metric: str  # "ttft_ms p50", "throughput output_tokens_per_s" ...
    base: float
    value: float
    ratio: float
    ci95: tuple[float, float]


class Search(msgspec.Struct, kw_only=True):
    """What `tandem bench goodput` found."""

    attainment: float  # the share that was asked for
    rate: float  # highest rate that held, 0 if none did
    failed_rate: float | None = None  # lowest rate that did not
    goodput: float = 0.0  # requests per second that met the SLO at `rate`
    finished: bool = True  # False: it ended early, and a higher rate might hold


class Experiment(msgspec.Struct, kw_only=True):
    """`kind`: run, sweep, goodput or compare. `axis`: rate or concurrency."""

    kind: str
    title: str
    runs: list[Run]
    axis: str = "rate"
    search: Search | None = None
    ratios: list[Ratio] = []
    stopped_because: str = ""  # why not all runs were made; empty: all were
