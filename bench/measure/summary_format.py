"""The JSON that `--json` writes. Its names are stable: other tools read it; docs/bench.md defines every number."""

import msgspec

from bench.config import LoadConfig

FORMAT_VERSION = 1


class Distribution(msgspec.Struct, kw_only=True):
    """Of a latency in milliseconds. `ci95` has the 95 % bootstrap interval of each statistic: [low, high].

    All are None when nothing was measured.
    """

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    ci95: dict[str, tuple[float, float]] = {}


class Throughput(msgspec.Struct, kw_only=True):
    """Of completed requests, per second of the measured time."""

    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    input_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0


class Tokens(msgspec.Struct, kw_only=True):
    """Sums over completed requests."""

    input: int = 0  # as the server counted them, else as they were made
    output: int = 0
    cached: int | None = None  # None: the server does not tell
    cached_by: dict[str, int] = {}  # cached by where: worker, peer, host, disk, redis; empty: only simulations tell
    predicted_cached: int | None = None  # what an endless cache would hold; None: the workload does not say
    wrong_input_length: int = 0  # requests whose prompt the server counted otherwise than it was made
    wrong_output_length: int = 0  # requests whose answer has another length than was asked for


class Planner(msgspec.Struct, kw_only=True):
    """What the planner did in a simulated run."""

    mode: str  # advise or act
    decisions: int = 0
    actions: int = 0  # that were carried out
    advised: int = 0  # that would have been, in the mode advise
    by_kind: dict[str, int] = {}  # actions: flip, add, remove, shed
    worker_hours: float = 0.0  # that workers were there, from when they were asked for
    failures: int = 0  # of workers


class Objective(msgspec.Struct, kw_only=True):
    """One part of the SLO."""

    name: str  # "ttft", "tpot", "e2e", "itl_p99" ...
    limit_ms: float
    attainment: float  # share of requests that met it, failed ones count as missed


class Goodput(msgspec.Struct, kw_only=True):
    """Requests that met every objective."""

    slo: str
    requests_per_s: float
    attainment: float  # share of all requests that met every objective
    ci95: tuple[float, float]  # of attainment
    objectives: list[Objective]


class Clients(msgspec.Struct, kw_only=True):
    """Requests of one kind of unruly client. They are in no latency and no throughput."""

    sent: int = 0
    as_expected: int = 0  # slow: whole answer; disconnect, cancel: left when meant to; bad: refused with 4xx
    unexpected: dict[str, int] = {}  # by kind of error


class Check(msgspec.Struct, kw_only=True):
    """Answers compared with what they should be."""

    mode: str  # "greedy" or "expect"
    compared: int = 0
    equal: int = 0
    different: list[str] = []  # one line each: which request, where they part
    unmatched: int = 0  # expect: answers that the file has nothing to compare with


class Summary(msgspec.Struct, kw_only=True):
    """One run."""

    config: LoadConfig
    format_version: int = FORMAT_VERSION
    started_at: str = ""  # ISO 8601, UTC
    measured_s: float = 0.0  # from the first counted send to the last end
    valid: bool = True
    invalid_because: list[str] = []
    interrupted: bool = False
    requests: int = 0  # counted ones: without warm-up and unruly clients
    completed: int = 0
    unfinished: int = 0  # under way when the run was ended: neither completed nor failed
    errors: dict[str, int] = {}  # by kind; requests = completed + errors + unfinished
    error_examples: dict[str, str] = {}  # by kind: what the server or the system said
    retry_after_s: Distribution | None = None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    throughput: Throughput
    tokens: Tokens
    goodput: Goodput | None = None
    clients: dict[str, Clients] = {}
    check: Check | None = None
    planner: Planner | None = None  # only simulations tell
    send_lag_ms: Distribution
    loop_lag_ms: Distribution
