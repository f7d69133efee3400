"""One series told ahead by whoever told it best so far, with a band as wide as it was wrong.

Every candidate says at each value what it expects some steps later. When that time has come it is compared; the mean
error decides, for each distance, who is believed, and the quantiles of the same errors make the band, as in split
conformal prediction (Vovk et al., 2005). Errors are divided by the root of what was expected, since counts vary so:
what was learned at night holds by day.
"""

import math

import numpy as np

from planner.forecast.autoregressive import Autoregressive
from planner.forecast.holt_winters import HoltWinters
from planner.forecast.level import Level
from planner.forecast.series import Model, Numbers

_KEPT = 240  # errors of each candidate and distance
_FEWEST = 10  # errors before candidates are compared
_UNKNOWN = 0.25  # share of the mean that a band has beyond the noise while no error is known, and at the most
_LIKELY = 8  # values of a spread
_FIRST = "constant, 0.5"  # who is believed until then


class Picked:
    """A series, and all who forecast it."""

    def __init__(self, step: float, unit: float, *, quantile: float = 0.9, longest: float = 900.0) -> None:
        """`step`: seconds between two values. `unit`: what one request makes in a value; less is noise. `quantile`: the
        probability with which a value stays below the band's upper end, and with which it stays above the lower one.
        `longest`: seconds ahead that will be asked for.
        """
        self._models: tuple[Model, ...] = (Level(), HoltWinters(step), Autoregressive())
        self._names = [name for model in self._models for name in model.names]
        self._step, self._unit, self._quantile = step, unit, quantile
        most = max(1, math.ceil(longest / step))
        self._steps = np.unique(np.append(2 ** np.arange(most.bit_length()), most))  # 1, 2, 4 ... most
        self._told = np.full((most + 1, len(self._names), len(self._steps)), np.nan)  # a ring of forecasts
        self._errors = np.full((_KEPT, len(self._names), len(self._steps)), np.nan)  # a ring, each over the root
        self._values = np.full(_KEPT, np.nan)  # a ring
        self._number = 0

    def add(self, value: float, at: float) -> None:
        """The next value, NaN where nothing was measured; `at` in unix seconds."""
        if not math.isnan(value):
            before = self._number - self._steps
            told = self._told[before % len(self._told), :, np.arange(len(self._steps))]
            told[before < 0] = np.nan
            self._errors[self._number % _KEPT] = ((value - told) / self._root(told)).T
        else:
            self._errors[self._number % _KEPT] = np.nan
        self._values[self._number % _KEPT] = value
        for model in self._models:
            model.add(value, at)
        expected = np.concatenate([model.ahead(self._steps) for model in self._models])
        self._told[self._number % len(self._told)] = np.maximum(expected, 0.0)
        self._number += 1

    @property
    def names(self) -> list[str]:
        """Of all candidates."""
        return self._names

    def expected(self, steps: int) -> Numbers:
        """`[candidates]`: what each says of so many steps after the last value. NaN: nothing known yet."""
        told: Numbers = np.concatenate([model.ahead(np.array([steps])) for model in self._models])[:, 0]
        return told.clip(0.0)

    def ahead(self, seconds: float) -> tuple[float, float, float, str]:
        """(mean, lower, upper, who says so). NaN before the first value. Beyond `longest` the band is that of it."""
        mean, errors, who = self._told_of(seconds)
        below, above = self._width(errors, mean)
        return mean, max(0.0, mean - below), mean + above, self._names[who]

    def spread(self, seconds: float) -> tuple[float, ...]:
        """Equally likely values of the rate behind what will be counted. (): nothing is known yet.

        A count of chance arrivals varies although their rate does not, and who serves them has queues for that. So as
        much is taken from the errors as a Poisson's would be; what is left is how wrong the rate was, and bursts.
        """
        mean, errors, _ = self._told_of(seconds)
        if math.isnan(mean):
            return ()
        root = float(self._root(np.array(mean)))
        unknown = self._unknown(len(errors), mean, root)
        if not len(errors):
            return (mean + unknown,)
        square = float(np.square(errors).mean())
        left = math.sqrt(max(0.0, 1 - self._unit / square)) if square else 0.0
        middle = float(np.median(errors))
        likely = np.quantile(errors, (np.arange(_LIKELY) + 0.5) / _LIKELY)
        values = mean + root * (middle + left * (likely - middle)) + unknown
        most = self._most(mean, root)
        return tuple(float(value) for value in np.clip(values, 0.0, most))

    def _told_of(self, seconds: float) -> tuple[float, Numbers, int]:
        """What is expected, the errors that are known of who says so, and who that is."""
        steps = max(1, round(seconds / self._step))
        at = min(int(np.searchsorted(self._steps, steps)), len(self._steps) - 1)
        known = self._errors[: min(self._number, _KEPT), :, at]
        who = self._pick(known)
        return float(self.expected(steps)[who]), known[~np.isnan(known[:, who]), who], who

    def _pick(self, known: Numbers) -> int:
        first = self._names.index(_FIRST)
        counts = (~np.isnan(known)).sum(axis=0)
        if not len(known) or counts[first] < _FEWEST:
            return first
        wrong = np.nansum(np.abs(known), axis=0) / np.maximum(1, counts)
        return int(np.argmin(np.where(counts >= _FEWEST, wrong, np.inf)))

    def _width(self, errors: Numbers, mean: float) -> tuple[float, float]:
        """How far below and above the mean. Above never further than a share beyond all that was seen or is expected:

        where a series moved to another level for good, the errors of the move say nothing of what comes.
        """
        if math.isnan(mean):
            return math.nan, math.nan
        root, count = float(self._root(np.array(mean))), len(errors)
        most, unknown = self._most(mean, root) - mean, self._unknown(count, mean, root)
        if not count:
            return unknown, unknown
        rank = min(count, math.ceil((count + 1) * self._quantile)) - 1
        ranked = np.sort(errors)
        low, high = float(ranked[count - 1 - rank]), float(ranked[rank])
        return max(0.0, -low) * root + unknown, min(most, max(0.0, high) * root + unknown)

    def _most(self, mean: float, root: float) -> float:
        seen = max(mean, float(np.nan_to_num(self._values).max()))
        return (1 + _UNKNOWN) * seen + 2 * root * math.sqrt(self._unit)

    def _unknown(self, count: int, mean: float, root: float) -> float:
        """What is added to a band as long as few errors are known."""
        # The smallest sample whose greatest value is a bound with this probability.
        enough = math.ceil(1 / (1 - self._quantile))
        return max(0.0, 1 - count / enough) * (_UNKNOWN * mean + 2 * root * math.sqrt(self._unit))

    def _root(self, expected: Numbers) -> Numbers:
        return np.sqrt(np.maximum(expected, self._unit))
