"""Percentiles and their bootstrap intervals, over values that come in clusters: one or more of each request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.measure.summary_format import Distribution

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Floats  # of one request

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_INTERVAL = (2.5, 97.5)  # percent
_BUDGET = 40_000_000  # values that all resamples together may touch: about a second
_FEWEST = 100  # resamples, however many values there are


class Sample:
    """Values of several requests, sorted once, whose statistics can be taken under any weights of the requests."""

    def __init__(self, values: Sequence[Values]) -> None:
        """`values`: those of each request; a request may have none."""
        sizes = np.fromiter((len(of_request) for of_request in values), np.int64, len(values))
        flat = np.concatenate([np.asarray(of_request, np.float64) for of_request in values] or [np.empty(0)])
        order = np.argsort(flat, kind="stable")
        self.sorted: Floats = flat[order]
        owners = np.repeat(np.arange(len(values), dtype=np.int32), sizes)
        self._owners = owners[order]
        self._sizes = sizes
        self._sums = np.bincount(owners, flat, minlength=len(values))
        self.clusters = len(values)

    def __len__(self) -> int:
        return len(self.sorted)

    def quantiles(self, at: Sequence[float], weights: npt.NDArray[np.int64] | None = None) -> Floats:
        """Quantiles by linear interpolation, as numpy.quantile gives them when each request is there `weights` times.

        `weights`: [clusters]; None: each once. NaN when no value has a weight.
        """
        if weights is None:
            return np.quantile(self.sorted, at) if len(self) else np.full(len(at), np.nan)
        upto = np.cumsum(weights[self._owners])  # of the expanded sample, how many are at or before each value
        if not len(upto) or not upto[-1]:
            return np.full(len(at), np.nan)
        position = np.asarray(at) * (upto[-1] - 1)
        below = np.floor(position).astype(np.int64)
        above = np.minimum(below + 1, upto[-1] - 1)
        low, high = self.sorted[np.searchsorted(upto, np.stack((below, above)), side="right")]
        return np.asarray(low + (high - low) * (position - below))

    def mean(self, weights: npt.NDArray[np.int64]) -> float:
        """Mean when each request is there `weights` times; NaN when no value has a weight."""
        total = weights @ self._sizes
        return float(weights @ self._sums / total) if total else float("nan")

    def affordable(self, resamples: int) -> int:
        """`resamples`, or fewer when there are very many values."""
        return min(resamples, max(_FEWEST, _BUDGET // max(1, len(self))))


def resampled(clusters: int, rng: np.random.Generator, times: int = 1) -> npt.NDArray[np.int64]:
    """How often each of `clusters` comes up when `times` as many are drawn with replacement."""
    return np.bincount(rng.integers(0, clusters, times * clusters), minlength=clusters)


def interval(draws: Floats) -> tuple[float, float]:
    """The 95 % percentile interval of bootstrap draws; NaN draws say nothing and are left out."""
    low, high = np.nanpercentile(draws, _INTERVAL)
    return float(low), float(high)


def distribution(values: Sequence[Values], seed: int = 0, resamples: int = 1000, scale: float = 1e3) -> Distribution:
    """Describes what was measured, times `scale`: the default makes milliseconds of seconds.

    `values` holds those of each request, so that the bootstrap draws whole requests: gaps of one answer are not
    independent of each other. `resamples` of 0 gives no intervals; fewer are drawn when there are very many values.
    """
    sample = Sample([of_request for of_request in values if len(of_request)])
    if not len(sample):
        return Distribution()
    at = list(QUANTILES.values())
    found = dict(zip(QUANTILES, (scale * sample.quantiles(at)).tolist(), strict=True))
    described = Distribution(
        count=len(sample),
        mean=float(scale * sample.sorted.mean()),
        max=float(scale * sample.sorted[-1]),
        **found,
    )
    if resamples:
        rng = np.random.default_rng(seed)
        draws = []
        for _ in range(sample.affordable(resamples)):
            weights = resampled(sample.clusters, rng)
            draws.append([sample.mean(weights), *sample.quantiles(at, weights)])
        columns = scale * np.array(draws).T
        described.ci95 = {name: interval(drawn) for name, drawn in zip(("mean", *QUANTILES), columns, strict=True)}
    return described


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share; (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    z = 1.959963984540054  # 97.5 % quantile of the normal distribution
    share = successes / trials
    centre = share + z * z / (2 * trials)
    reach = z * float(np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)))
    scale = 1 + z * z / trials
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)
