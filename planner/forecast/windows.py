"""Windows made into series, one each for arrivals, lengths and reuse, and each told ahead on its own."""

import math

from planner.forecast import Band, Forecast
from planner.forecast.picked import Picked
from planner.window import NAN, Window, measured

_MOST_MISSING = 1_000  # windows that are filled in as gaps, half a millisecond each; more, and history says nothing


class Picking:
    """A Forecaster. The steps of its series are the first window's seconds; windows that are missing are gaps."""

    def __init__(self, quantile: float = 0.9) -> None:
        """`quantile`: the probability with which what comes stays under the upper end."""
        self._quantile = quantile
        self._series: dict[str, Picked] = {}
        self._step = self._at = NAN

    def add(self, window: Window) -> None:
        """Lengths without requests, or of 0, are gaps, so that a night without traffic keeps the last ones."""
        if not measured(window.at) or not (measured(window.seconds) and window.seconds > 0):
            return
        step = self._step
        if not self._series or window.at - self._at > _MOST_MISSING * step:
            step = self._step = window.seconds
            self._at = window.at - step
            units = {"arrivals": 1 / step, "prompt": 1.0, "output": 1.0, "cached": 0.01}
            self._series = {name: Picked(step, unit, quantile=self._quantile) for name, unit in units.items()}
        for missing in range(round((window.at - self._at) / step) - 1):
            for series in self._series.values():
                series.add(NAN, self._at + (missing + 1) * step)
        if window.at <= self._at:
            return
        self._at = window.at
        told = {"arrivals": window.rate}
        if window.arrivals > 0:
            share = window.cached_tokens / window.prompt_tokens if window.prompt_tokens > 0 else NAN
            told |= {"prompt": window.prompt_tokens, "output": window.output_tokens, "cached": min(1.0, share)}
        for name, series in self._series.items():
            value = told.get(name, NAN)
            possible = measured(value) and (value > 0 or name not in ("prompt", "output"))
            series.add(value if possible else NAN, window.at)

    def ahead(self, seconds: float) -> Forecast:
        """Nothing is known before the first window."""
        if not self._series:
            return Forecast()
        told = {name: series.ahead(seconds) for name, series in self._series.items()}
        bands = {name: Band(mean, upper) for name, (mean, _, upper, _) in told.items()}
        mean, _, upper, _ = told["arrivals"]
        bands["arrivals"] = Band(mean, upper, self._series["arrivals"].spread(seconds))
        mean, lower, _, _ = told["cached"]
        return Forecast(
            at=self._at + seconds,
            arrivals=bands["arrivals"],
            prompt_tokens=bands["prompt"],
            output_tokens=bands["output"],
            cached_share=Band(mean if math.isnan(mean) else min(1.0, mean), lower),
            method=told["arrivals"][3],
        )
