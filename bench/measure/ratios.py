"""How one target compares with another: ratios of metrics over rounds that ran in alternation."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.measure.experiment import Ratio, Run
from bench.measure.record import Record
from bench.measure.statistics import QUANTILES, Floats, Sample, interval, resampled
from bench.measure.summary import completed, latencies

_COMPARED = {name: QUANTILES[name] for name in ("p50", "p90", "p99")}

# Student's t, 97.5 %, by degrees of freedom from 1 on: few rounds tell little of how much rounds differ.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

Weights = npt.NDArray[np.int64]
Unit = tuple[int, int]  # round and id of a request: the same request for each target


class _Side:
    """The rounds of one target, pooled, over `units`: requests of either side. What this side lacks has no values."""

    def __init__(self, runs: Sequence[Run], units: Sequence[Unit]) -> None:
        found = _completed(runs)
        by_unit = [found.get(unit) for unit in units]
        values = latencies([record or Record(id=-1) for record in by_unit])
        self.samples = {f"{name}_ms": Sample(of_units) for name, of_units in values.items()}
        self._done = np.array([record is not None for record in by_unit], np.int64)
        self._output = np.array([record.tokens if record else 0 for record in by_unit], np.int64)
        self._seconds = np.array([run.summary.measured_s for run in runs])

    def metrics(self, requests: Weights, rounds: Weights) -> dict[str, float]:
        """All metrics when each request and each round is there so many times. NaN where nothing was measured."""
        metrics: dict[str, float] = {}
        for name, sample in self.samples.items():
            quantiles = 1e3 * sample.quantiles(list(_COMPARED.values()), requests)
            metrics |= {
                f"{name} {quantile}": float(value) for quantile, value in zip(_COMPARED, quantiles, strict=True)
            }
        seconds = float(rounds @ self._seconds) or float("nan")
        metrics["throughput requests_per_s"] = float(requests @ self._done) / seconds
        metrics["throughput output_tokens_per_s"] = float(requests @ self._output) / seconds
        return metrics


def ratios(base: list[Run], other: list[Run], target: str, seed: int = 0, resamples: int = 1000) -> list[Ratio]:
    """Each metric of `other` over that of `base`, pooled over rounds; `target` names `other`.

    Run k of one belongs to run k of the other: same workload, same seed, one after the other. The bootstrap draws
    rounds, and then requests in each, for both sides at once, so that what a round or a request has in common on both
    sides cancels out. The interval is at least that of Student's t over the rounds' own log ratios: a bootstrap of few
    rounds is too sure of itself. Rounds that only one side has are left out, and metrics without a value or with a base
    of zero.
    """
    rounds = min(len(base), len(other))
    base, other = base[:rounds], other[:rounds]
    units = sorted({unit for runs in (base, other) for unit in _completed(runs)})
    if not units:
        return []
    sides = _Side(base, units), _Side(other, units)
    sizes = np.bincount([number for number, _ in units], minlength=rounds)
    once = np.ones(len(units), np.int64), np.ones(rounds, np.int64)
    base_metrics, other_metrics = (side.metrics(*once) for side in sides)
    names = [name for name in base_metrics if base_metrics[name] > 0 and np.isfinite(other_metrics[name])]
    rng = np.random.default_rng(seed)
    affordable = min(sample.affordable(resamples) for side in sides for sample in side.samples.values())
    draws = np.array([_draw(sides, names, sizes, rng) for _ in range(affordable)])
    found = []
    for name, drawn in zip(names, draws.T, strict=True):
        ratio = other_metrics[name] / base_metrics[name]
        low, high = interval(drawn)
        spread = _spread_of_rounds(sides, units, rounds, name)
        ci95 = (min(low, ratio / spread), max(high, ratio * spread))
        values = {"base": base_metrics[name], "value": other_metrics[name], "ratio": ratio}
        found.append(Ratio(target=target, metric=name, ci95=ci95, **values))
    return found


def _spread_of_rounds(sides: tuple[_Side, _Side], units: Sequence[Unit], rounds: int, name: str) -> float:
    """Factor by which the mean of the rounds' ratios may be off either way, by Student's t; 1 for a single round."""
    of_round = np.array([number for number, _ in units])
    logs = []
    for number in range(rounds):
        weights = (of_round == number).astype(np.int64), (np.arange(rounds) == number).astype(np.int64)
        base, other = (side.metrics(*weights)[name] for side in sides)
        if base > 0 and other > 0:
            logs.append(np.log(other / base))
    if len(logs) < 2:
        return 1.0
    student = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1]
    return float(np.exp(student * np.std(logs, ddof=1) / np.sqrt(len(logs))))


def _draw(sides: tuple[_Side, _Side], names: Sequence[str], sizes: Weights, rng: np.random.Generator) -> Floats:
    """Ratios of one bootstrap sample; NaN where it has no ratio."""
    rounds = resampled(len(sizes), rng)
    requests = np.concatenate(
        [resampled(int(size), rng, times=int(times)) for size, times in zip(sizes, rounds, strict=True)]
    )
    base, other = (side.metrics(requests, rounds) for side in sides)
    return np.array([other[name] / base[name] if base[name] > 0 else np.nan for name in names])


def _completed(runs: Sequence[Run]) -> dict[Unit, Record]:
    return {(number, record.id): record for number, run in enumerate(runs) for record in completed(run.result.records)}
