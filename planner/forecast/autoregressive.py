"""Autoregression: a value is a constant plus weights of the ones before it, found anew each time by least squares."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from planner.forecast.series import Numbers

_KEPT = 288  # values that the weights are fitted to
_FEWEST = 24  # pairs of a value and those before it
_RIDGE = 1e-6  # of the values' variance, so that there is always a solution


class Autoregressive:
    """Of one order. Forecasts stay between 0 and twice the most that was seen, whatever the weights."""

    def __init__(self, order: int = 6) -> None:
        self.names = (f"autoregression of {order}",)
        self._order = order
        self._values = np.empty(0)
        self._last = np.nan

    def add(self, value: float, at: float) -> None:
        """Pairs with a gap in them are left out of the fit."""
        self._values = np.append(self._values[1 - _KEPT :], value)
        if not np.isnan(value):
            self._last = value

    def ahead(self, steps: NDArray[np.int64]) -> Numbers:
        """The last value known while there are too few to fit, or after gaps that leave nothing to go on with."""
        fitted = self._fit()
        if fitted is None:
            return np.full((1, len(steps)), self._last)
        constant, weights = fitted
        # What is missing at the end is taken to be as the last value.
        recent = np.where(np.isnan(self._values[-self._order :]), self._last, self._values[-self._order :])
        most, path = 2 * float(np.nanmax(self._values)), list(recent)
        for _ in range(int(steps.max())):
            told = constant + float(weights @ np.array(path[-self._order :]))
            path.append(min(max(told, 0.0), most))
        return np.array(path)[self._order - 1 + steps][None, :]

    def _fit(self) -> tuple[float, Numbers] | None:
        if len(self._values) <= self._order:
            return None
        rows = sliding_window_view(self._values, self._order + 1)
        rows = rows[~np.isnan(rows).any(axis=1)]
        if len(rows) < _FEWEST:
            return None
        means = rows.mean(axis=0)
        before, after = (rows - means)[:, :-1], (rows - means)[:, -1]
        square = before.T @ before
        square[np.diag_indices(self._order)] += _RIDGE * len(rows) * max(float(after.var()), 1e-12)
        weights: Numbers = np.linalg.solve(square, before.T @ after)
        return float(means[-1] - weights @ means[:-1]), weights
