"""Service level objectives: what a request must hold to count for goodput."""

import re

import msgspec
import numpy as np

from bench.errors import BenchError
from bench.measure.record import Record

_PARTS = {"ttft": None, "tpot": None, "e2e": None, "itl_p50": 50, "itl_p90": 90, "itl_p95": 95, "itl_p99": 99}
NAMES = (*_PARTS, "itl_max")
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_FORM = "write e.g. ttft=200ms,tpot=10ms,itl_p99=20ms,e2e=2s"


class Limit(msgspec.Struct, frozen=True):
    """One objective: the request's `name` is at most `ms` milliseconds."""

    name: str
    ms: float

    def met_by(self, record: Record) -> bool:
        """Whether a request held it. One that failed held nothing; what a request does not have, it holds.

        An answer of one token has neither TPOT nor gaps. But an answer without any text misses its TTFT.
        """
        if record.error:
            return False
        match self.name:
            case "ttft":
                return 0 <= 1e3 * record.ttft <= self.ms
            case "tpot":
                return 1e3 * record.tpot <= self.ms
            case "e2e":
                return 1e3 * record.e2e <= self.ms
        gaps = record.gaps
        if not gaps:
            return True
        percent = _PARTS.get(self.name)
        worst = max(gaps) if percent is None else float(np.percentile(gaps, percent))
        return 1e3 * worst <= self.ms


class Slo(msgspec.Struct, frozen=True):
    """All objectives of a run."""

    text: str  # as it was given
    limits: tuple[Limit, ...]

    def met(self, record: Record) -> dict[str, bool]:
        """By name of the objective, whether the request held it."""
        return {limit.name: limit.met_by(record) for limit in self.limits}


def parse_slo(text: str) -> Slo:
    """Reads "ttft=200ms,tpot=10ms"; times in us, ms or s. Raises BenchError that says how to write it."""
    limits: dict[str, Limit] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", part)
        if match is None:
            raise BenchError(f"--slo: {part.strip()!r} is not name=time with a time in us, ms or s; {_FORM}")
        name, value, unit = match.groups()
        if name not in NAMES:
            raise BenchError(f"--slo: there is no objective {name!r}, only {', '.join(NAMES)}; {_FORM}")
        if name in limits:
            raise BenchError(f"--slo: {name} is given twice; {_FORM}")
        if not float(value):
            raise BenchError(f"--slo: {name} must be above 0; {_FORM}")
        limits[name] = Limit(name, float(value) * _MILLISECONDS[unit])
    return Slo(text.strip(), tuple(limits.values()))
