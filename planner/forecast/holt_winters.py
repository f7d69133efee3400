"""Holt-Winters: a level, a trend that fades out, and the time of day.

    level'  = a (value - day) + (1 - a) (level + f trend)
    trend'  = b (level' - level) + (1 - b) f trend
    day'    = g (value - level') + (1 - g) day          (of this part of the day)
    ahead h = level + (f + f^2 + ... + f^h) trend + day (of the part that h falls into)

P. R. Winters, Forecasting sales by exponentially weighted moving averages, 1960; the fading trend is Gardner and
McKenzie's, 1985. The day counts once a whole one was seen: its parts begin as their distance from that day's mean.
"""

import numpy as np
from numpy.typing import NDArray

from planner.forecast.series import Numbers

DAY = 86_400.0  # seconds
PARTS = 96  # of a day, a quarter of an hour each; between their middles lie straight lines
_SMOOTHING = np.array([(0.5, 0.05), (0.2, 0.02), (0.05, 0.005)])  # a and b of each candidate
_FADING = 0.97  # f, a step
_DAY_SHARE = 0.3  # g, of all values that fall into one part of one day together


class HoltWinters:
    """Candidates differ in a and b; each is there with and without the day. `step`: seconds between two values."""

    names = tuple(f"Holt-Winters{kind}, {a:g}" for kind in ("", " with the day") for a in _SMOOTHING[:, 0].tolist())

    def __init__(self, step: float) -> None:
        self._step = step
        share = 1 - (1 - _DAY_SHARE) ** min(1.0, step * PARTS / DAY)
        self._a = np.tile(_SMOOTHING[:, 0], 2)
        self._b = np.tile(_SMOOTHING[:, 1], 2)
        self._g = np.repeat([0.0, share], len(_SMOOTHING))
        self._level = np.full(len(self._a), np.nan)
        self._trend = np.zeros(len(self._a))
        self._day = np.zeros((len(self._a), PARTS))
        self._at = self._began = np.nan
        self._sums, self._counts = np.zeros(PARTS), np.zeros(PARTS)  # of the first day
        self._knows_day = False

    def add(self, value: float, at: float) -> None:
        """Over a gap the trend goes on."""
        self._at = at
        if np.isnan(self._began):
            self._began = at
        if not self._knows_day and at - self._began >= DAY:
            self._first_day()
        expected = self._level + _FADING * self._trend
        if np.isnan(value):
            if not np.isnan(self._level[0]):
                self._level, self._trend = expected, _FADING * self._trend
            return
        part = int(at % DAY / DAY * PARTS)
        self._sums[part] += value
        self._counts[part] += 1
        if np.isnan(self._level[0]):
            self._level[:] = value
            return
        day = self._of_day(np.array([at]))[:, 0]
        level = self._a * (value - day) + (1 - self._a) * expected
        self._trend = self._b * (level - self._level) + (1 - self._b) * _FADING * self._trend
        self._level = level
        if self._knows_day:
            self._day[:, part] += self._g * (value - level - self._day[:, part])

    def ahead(self, steps: NDArray[np.int64]) -> Numbers:
        """Without the day: the first half of the candidates."""
        reach = _FADING * (1 - _FADING**steps) / (1 - _FADING)
        times = self._at + self._step * steps.astype(np.float64)
        told: Numbers = self._level[:, None] + self._trend[:, None] * reach + self._of_day(times)
        return told

    def _first_day(self) -> None:
        """Parts without values count as the mean."""
        self._knows_day = True
        if not (seen := self._counts > 0).any():
            return
        means = np.divide(self._sums, self._counts, out=np.zeros(PARTS), where=seen)
        parts = np.where(seen, means - means[seen].mean(), 0.0)
        self._day[self._g > 0] = parts
        self._level -= self._of_day(np.array([self._at]))[:, 0]

    def _of_day(self, times: Numbers) -> Numbers:
        """`[candidates, len(times)]`"""
        place = times % DAY / DAY * PARTS - 0.5
        before = np.floor(place).astype(np.int64)
        rest = place - before
        return self._day[:, before % PARTS] * (1 - rest) + self._day[:, (before + 1) % PARTS] * rest
