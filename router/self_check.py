"""Whether routing knows what it does: what was predicted to be cached, against what was found.

Precision is the part of the tokens predicted that were found, recall the part of those found that were predicted.
"""

import math
from enum import Enum

_HALF_LIFE = 30.0  # seconds in which a request comes to count half as much
_FEWEST = 20.0  # requests on which precision is judged
_PRECISION = 0.5  # below, predictions are not worth following
_TOLD = ("prefix", "overlap")  # policies that need workers' KV events
_BY_CACHE = (*_TOLD, "history")


class Mode(Enum):
    """What placements go by."""

    PREFIX = "prefix"
    LOAD_ONLY = "load_only"


class ReuseCheck:
    """Predicted and actual reuse of the latest requests, each of which counts less as time goes by."""

    def __init__(self) -> None:
        self._requests = self._predicted = self._found = self._both = 0.0
        self._at = 0.0  # monotonic seconds

    def observe(self, predicted: int, found: int, now: float) -> None:
        """So many tokens of a request's prompt were believed to be cached where it was computed, and so many were."""
        self._fade(now)
        self._requests += 1
        self._predicted += predicted
        self._found += found
        self._both += min(predicted, found)

    @property
    def requests(self) -> float:
        """That count."""
        return self._requests

    @property
    def precision(self) -> float:
        """NaN: nothing was predicted."""
        return self._both / self._predicted if self._predicted else math.nan

    @property
    def recall(self) -> float:
        """NaN: nothing was found."""
        return self._both / self._found if self._found else math.nan

    def tick(self, now: float) -> None:
        """Now and then: time goes by."""
        self._fade(now)

    def _fade(self, now: float) -> None:
        factor = 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE)
        self._at = now
        self._requests, self._predicted = self._requests * factor, self._predicted * factor
        self._found, self._both = self._found * factor, self._both * factor


def judge(policy: str, workers: int, followed: int, check: ReuseCheck) -> tuple[Mode, str]:
    """What placements go by, and why if that is load alone. `followed`: workers that tell what they hold."""
    if policy not in _BY_CACHE:
        return Mode.LOAD_ONLY, f"the policy {policy} does not look at caches"
    if policy in _TOLD and workers and not followed:
        return Mode.LOAD_ONLY, f"of {workers} workers none tells what it has cached"
    if check.requests >= _FEWEST and check.precision < _PRECISION:
        share = f"{100 * check.precision:.0f} %"
        return Mode.LOAD_ONLY, f"only {share} of the tokens that were predicted to be cached were found there"
    return Mode.PREFIX, ""


def is_alarm(policy: str, mode: Mode) -> bool:
    """Whether somebody should look: load decides though the policy is another."""
    return mode is Mode.LOAD_ONLY and policy in _BY_CACHE
