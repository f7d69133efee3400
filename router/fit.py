"""Coefficients of `router.cost`, fitted to what became of placements: recursive least squares, a row for each worker.

What is measured counts relative to what was predicted, so that a long prompt says no more than a short one, and the
latest counts most. An outlier moves little: an error counts up to `_MOST_ERROR` times the prediction. Coefficients stay
between bounds, and uncertainty never exceeds that of the beginning, so that nothing winds up where one kind of request
comes for long. Measurements that cannot be are refused.

A worker of which nothing is known has the median of those of its role and model that are known. Most are alike, and
chance must not send all to one of them: small differences from the median fade, large ones stay as long as they are
measured. Who seems slow gets no requests that could show otherwise; so what was not measured for some time fades, too,
and is uncertain then.
"""

import math
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from router.cost import Prediction
from router.fleet import TPOT_PRIOR, TTFT_PRIOR, Fleet

_MEMORY = 0.97  # weight of what was known before, at each measurement
_MOST_ERROR = 2.0
_LEAST_SECONDS = 1e-3  # a prediction below counts as so much
_MOST_SECONDS = 3600.0  # more was not measured but made up
_ALIKE = 0.5  # a worker whose coefficient is within so much of the median is believed to be like the others
_ALIKE_SECONDS = 5.0  # in which it comes nearer to it by two thirds
_STALE_SECONDS = 5.0  # without a measurement: then large differences fade as well
_LEAST_GAPS = 4  # between tokens: of fewer a rate says little
_BOUND = 100.0  # coefficients stay between 0 and so many times the prior

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a gateway saw of an attempt."""

    ttft: float | None  # seconds from the placement to the first token; None: none came
    output_tokens: int
    decode_seconds: float  # from the first to the last of them

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None: there were too few."""
        gaps = self.output_tokens - 1
        return self.decode_seconds / gaps if gaps >= _LEAST_GAPS else None

    def against(self, prediction: Prediction) -> dict[str, float]:
        """Actual through predicted seconds of "ttft" and "tpot", as far as they were measured."""
        pairs = {"ttft": (self.ttft, prediction.ttft), "tpot": (self.tpot, prediction.tpot)}
        return {
            name: actual / predicted
            for name, (actual, predicted) in pairs.items()
            if _possible(actual) and predicted > 0
        }


class Fit:
    """Writes the columns `ttft` and `tpot` of the fleet's table."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ttft = _Squares("ttft", TTFT_PRIOR, fleet)
        self._tpot = _Squares("tpot", TPOT_PRIOR, fleet)
        self._ticked = 0.0

    def learn(self, prediction: Prediction, measured: Measured, *, computing: int, decode: int) -> None:
        """An attempt on these rows has ended well. Where two workers took part, each learns from what the other's part
        leaves."""
        if _possible(measured.ttft):
            parts = [(computing, prediction.computing)]
            if prediction.receiving:
                parts.append((decode, prediction.receiving))
            self._ttft.learn(parts, measured.ttft)
        if _possible(measured.tpot):
            self._tpot.learn([(decode, prediction.decoding)], measured.tpot)

    def forget(self, row: int) -> None:
        """The worker has left."""
        self._ttft.forget(row)
        self._tpot.forget(row)

    def tick(self, now: float) -> None:
        """Now and then, `now` in monotonic seconds: new workers begin with what their like has."""
        seconds, self._ticked = max(0.0, now - self._ticked), now
        self._ttft.spread(seconds)
        self._tpot.spread(seconds)


def _possible(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and math.isfinite(seconds) and 0 < seconds <= _MOST_SECONDS


class _Squares:
    """Of one column of coefficients."""

    def __init__(self, column: str, prior: Floats, fleet: Fleet) -> None:
        self._column = column
        self._fleet = fleet
        self._prior = prior
        self._most = _BOUND * prior
        self._variances = prior**2  # each may as well be half as much or twice
        self._start = np.diag(self._variances)
        self._covariance = np.zeros((0, len(prior), len(prior)))
        self._known = np.zeros(0, np.int64)  # measurements
        self._quiet = np.zeros(0)  # seconds since the latest one
        self._fit()

    def learn(self, parts: list[tuple[int, tuple[float, ...]]], seconds: float) -> None:
        """`parts`: (row, features) of each worker; their products with the coefficients together took `seconds`."""
        self._fit()
        table = self._fleet.table[self._column]
        if not all(len(of) == table.shape[1] and all(map(math.isfinite, of)) for _, of in parts):
            return
        scale = max(_LEAST_SECONDS, sum(float(table[row] @ np.array(of)) for row, of in parts))
        error = min(_MOST_ERROR, seconds / scale - 1.0)
        for row, of in parts:
            x, covariance = np.array(of) / scale, self._covariance[row]
            spread = covariance @ x
            gain = spread / (_MEMORY + x @ spread)
            table[row] = np.minimum(np.maximum(table[row] + gain * error, 0.0), self._most)
            covariance -= gain[:, None] * spread
            covariance /= _MEMORY
            wound = np.sqrt(np.minimum(1.0, self._variances / np.maximum(covariance.diagonal(), 1e-300)))
            covariance *= wound[:, None] * wound
            self._known[row] += 1
            self._quiet[row] = 0.0

    def forget(self, row: int) -> None:
        """As in the beginning."""
        self._fit()
        self._covariance[row], self._known[row], self._quiet[row] = self._start, 0, 0.0

    def spread(self, seconds: float) -> None:
        """The median: to those that nothing is known of in whole, and in `seconds` in part to those that differ little
        from it or were not measured for some time."""
        self._fit()
        self._quiet += seconds
        table, known = self._fleet.table, self._known > 0
        column = table[self._column]
        pull = 1.0 - math.exp(-seconds / _ALIKE_SECONDS)
        stale = self._quiet > _STALE_SECONDS
        for members in self._fleet.pools():
            measured = column[members & known]
            if len(measured):
                measured.sort(axis=0)
                median = (measured[(len(measured) - 1) // 2] + measured[len(measured) // 2]) / 2
                away = column[members] - median
                fades = (np.abs(away) <= _ALIKE * np.maximum(median, self._prior)) | stale[members, None]
                column[members] -= np.where(known[members, None], pull * fades, 1.0) * away
        stale &= known
        if stale.any():
            self._covariance[stale] += pull * (self._start - self._covariance[stale])

    def _fit(self) -> None:
        """As long as the table."""
        if (more := len(self._fleet.table) - len(self._known)) > 0:
            self._covariance = np.concatenate([self._covariance, np.tile(self._start, (more, 1, 1))])
            self._known = np.concatenate([self._known, np.zeros(more, np.int64)])
            self._quiet = np.concatenate([self._quiet, np.zeros(more)])
