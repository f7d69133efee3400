"""The future is as the present: means of what was, with weights that fall off with age (exponential smoothing)."""

import numpy as np
from numpy.typing import NDArray

from planner.forecast.series import Numbers

_WEIGHTS = (1.0, 0.5, 0.2, 0.05)  # of the newest value; 1: the last value is all that counts


class Level:
    """One candidate a weight; while few values are known, all count alike."""

    names = tuple(f"constant, {weight:g}" for weight in _WEIGHTS)

    def __init__(self) -> None:
        self._count = 0
        self._levels = np.full(len(_WEIGHTS), np.nan)

    def add(self, value: float, at: float) -> None:
        """A gap changes nothing."""
        if np.isnan(value):
            return
        self._count += 1
        if self._count == 1:
            self._levels[:] = value
        self._levels += np.maximum(_WEIGHTS, 1 / self._count) * (value - self._levels)

    def ahead(self, steps: NDArray[np.int64]) -> Numbers:
        """The levels."""
        return np.repeat(self._levels[:, None], len(steps), axis=1)
