"""Distributions of lengths, as flags name them."""

import re
from typing import Protocol

import msgspec
import numpy as np

from bench.errors import BenchError

_HELP = (
    "write e.g. 256, 100-300, normal:256,64, lognormal:256,128 or exp:256, perhaps with bounds: normal:256,64,1-1024"
)
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_BOUNDS = r"(?:,(\d{1,18})-(\d{1,18}))?"
_PATTERN = re.compile(rf"(normal|lognormal|exp):{_NUMBER}(?:,{_NUMBER})?{_BOUNDS}")
LONGEST = 1 << 24  # tokens; milliseconds of a time


class Length(Protocol):
    """A distribution of whole numbers."""

    def sample(self, rng: np.random.Generator) -> int:
        """One draw."""
        ...


class Uniform(msgspec.Struct, frozen=True):
    """All of `low` to `high` equally often; a fixed length where they are the same."""

    low: int
    high: int

    def sample(self, rng: np.random.Generator) -> int:
        """One draw."""
        return int(rng.integers(self.low, self.high + 1))


class Shaped(msgspec.Struct, frozen=True):
    """Normal, log-normal or exponential, of this mean and standard deviation, rounded and kept within bounds."""

    kind: str
    mean: float
    deviation: float
    low: int
    high: int

    def sample(self, rng: np.random.Generator) -> int:
        """One draw."""
        if self.kind == "normal":
            value = rng.normal(self.mean, self.deviation)
        elif self.kind == "exp":
            value = rng.exponential(self.mean)
        else:
            spread = np.log1p((self.deviation / self.mean) ** 2)
            value = rng.lognormal(np.log(self.mean) - spread / 2, np.sqrt(spread))
        return int(min(max(round(float(value)), self.low), self.high))


def parse_length(text: str, longest: int = LONGEST) -> Length:
    """Reads a distribution. Raises BenchError."""
    text = text.strip()
    if fixed := re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text):
        low, high = int(fixed[1]), int(fixed[2] or fixed[1])
        if not 1 <= low <= high <= longest:
            raise BenchError(f"length {text!r} must be at least 1 and at most {longest}, and its bounds in order")
        return Uniform(low, high)
    shaped = _PATTERN.fullmatch(text)
    if shaped is None or (shaped[3] is None) != (shaped[1] == "exp"):
        raise BenchError(f"length {text[:80]!r} is none: {_HELP}")
    low, high = int(shaped[4] or 1), int(shaped[5] or longest)
    if not 1e-6 <= float(shaped[2]) <= longest or not 1 <= low <= high <= longest:
        raise BenchError(f"length {text!r}: its mean must be above 0 and its bounds in order, from 1 to {longest}")
    if float(shaped[3] or 0.0) > longest:
        raise BenchError(f"length {text!r}: its deviation must be at most {longest}")
    return Shaped(shaped[1], float(shaped[2]), float(shaped[3] or 0.0), low, high)


def parse_seconds(text: str) -> Length:
    """Reads times in seconds, "0", "1.5", "0.5-2" or "exp:3", as a distribution of milliseconds. Raises BenchError."""
    text = text.strip()
    if fixed := re.fullmatch(rf"{_NUMBER}(?:-{_NUMBER})?", text):
        low, high = (round(1e3 * float(bound)) for bound in (fixed[1], fixed[2] or fixed[1]))
        if not low <= high <= LONGEST:
            raise BenchError(f"time {text!r}: its bounds must be in order, and at most {LONGEST // 1000} seconds")
        return Uniform(low, high)
    if shaped := re.fullmatch(rf"exp:{_NUMBER}", text):
        return Shaped("exp", min(1e3 * float(shaped[1]), float(LONGEST)), 0.0, 0, LONGEST)
    raise BenchError(f"time {text[:80]!r} is none: write seconds, e.g. 1, 0.5-2 or exp:3")
