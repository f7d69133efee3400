"""What a deployment makes of a load, without simulating it: the share of requests that keep to the objectives.

Prompts queue for the workers that compute them as in M/G/k: a request waits with the probability rho^(sqrt(2(k+1))-1)
(Sakasegawa 1977), then for an exponential time of mean s(1+cv^2)/2 / (k(1-rho)). Answers are together on a worker in
numbers that Little's law and the step's length give, with a Poisson's spread. Where a role has more work than it can
do, what is above 95 % of its capacity counts as not served, so that deployments that fail can be compared as well.

Only means of lengths are known: prompts and answers are taken to be spread as an exponential is. What that is off, and
what the profile is off, `Corrections` learn from measurements.
"""

import math
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.offer import Offer
from planner.simulator.timing import Timing
from planner.window import Window, measured

Shares = NDArray[np.float64]  # [workers + 1]: a share of the requests for each number of workers, 0 for none

_FULL = 0.95  # of a role's capacity
_QUANTILES = -np.log1p(-(np.arange(16) + 0.5) / 16)  # of an exponential of mean 1
_QUANTILES /= _QUANTILES.mean()
_SPREAD = float(np.square(_QUANTILES).mean() - 1)  # their squared coefficient of variation
_LEARNT = 0.2  # weight of a window's ratio
_BOUNDS = (0.5, 2.0)  # of a correction


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a second, and the means of a request. `spread`: multiples of the rate that are equally likely."""

    rate: float
    prompt_tokens: float
    output_tokens: float
    cached_share: float = 0.0
    spread: tuple[float, ...] = (1.0,)

    @property
    def context(self) -> float:
        """Tokens kept for a sequence that decodes, in the mean over its time: an exponential's longer ones stay."""
        return self.prompt_tokens + self.output_tokens


class Corrections(msgspec.Struct):
    """Measured over predicted: seconds of a prompt, seconds of a token, and the load that attainment speaks of."""

    prompt: float = 1.0
    token: float = 1.0
    load: float = 1.0

    def learn(self, offer: Offer, window: Window) -> None:
        """From one window; what was not measured leaves its ratio alone."""
        timing = offer.timing
        if measured(window.prefill_rate) and window.prefill_rate > 0 and window.computed_tokens >= 1:
            tokens = window.computed_tokens
            predicted = timing.prompt(0, math.ceil(tokens), offer.max_batched_tokens) / math.ceil(tokens)
            self.prompt = _moved(self.prompt, 1 / window.prefill_rate, predicted)
        lengths = measured(window.prompt_tokens) and measured(window.output_tokens)
        if measured(window.token_seconds) and measured(window.batch) and window.batch > 0 and lengths:
            context = window.prompt_tokens + window.output_tokens / 2
            each = timing.sequence + timing.kept_token * context
            self.token = _moved(self.token, window.token_seconds, timing.step + window.batch * each)

    def learn_load(self, predicted: float, attained: float) -> None:
        """Fewer requests kept to the objectives than the model said of the same load: it is as if there were more.

        Where both are all or none, nothing is learned. Goes up four times as fast as it comes down, from 0.5 to 1.5.
        """
        if measured(attained):
            short = predicted - min(1.0, attained)
            self.load = min(1.5, max(0.5, self.load + (0.4 if short > 0 else 0.1) * short))


def _moved(ratio: float, value: float, predicted: float) -> float:
    if not (measured(value) and value > 0 and predicted > 0):
        return ratio
    return (1 - _LEARNT) * ratio + _LEARNT * min(_BOUNDS[1], max(_BOUNDS[0], value / predicted))


class Performance:
    """Of one kind of worker under one load. `most`: the greatest number of workers that is asked for."""

    def __init__(
        self, offer: Offer, load: Load, ttft: float, tpot: float, most: int, corrections: Corrections | None = None
    ) -> None:
        self._offer, self._load, self._ttft, self._tpot = offer, load, ttft, tpot
        ratios = corrections or Corrections()
        self._counts = np.arange(1, most + 1, dtype=np.float64)
        timing, chunk = offer.timing, offer.max_batched_tokens
        self._prompts = np.maximum(1.0, load.prompt_tokens * (1 - load.cached_share) * _QUANTILES)
        behind = load.prompt_tokens * load.cached_share
        self._arrivals = np.array([timing.arrival(tokens) for tokens in behind + self._prompts])  # [prompts], seconds
        self._prompt_seconds = ratios.prompt * np.array(_seconds(timing, chunk, behind, tuple(self._prompts.tolist())))
        self._step = ratios.token * timing.step
        self._each = ratios.token * (timing.sequence + timing.kept_token * load.context)
        self._together = max(1.0, min(offer.max_running, offer.kv_tokens / max(1.0, load.context)))

    def prefill(self) -> Shares:
        """First tokens in time, by the number of workers that only prefill."""
        return self._first_tokens(self._prompt_seconds[None, :], self._arrivals[None, :])

    def decode(self) -> tuple[Shares, Shares]:
        """Answers with room at once, and tokens in time, by the number of workers that only decode."""
        timing, load = self._offer.timing, self._load
        moved = timing.transfer(round(min(load.prompt_tokens, self._offer.max_batched_tokens)))
        running, served = self._running(self._step, self._each)
        outputs = np.maximum(2.0, load.output_tokens * _QUANTILES)[None, :]
        tokens = self._tokens_in_time(running[:, None], self._tpot - moved / (outputs - 1), 0.0)
        room = _normal((self._together + 0.5 - running) / np.sqrt(np.maximum(running, 0.25)))
        return _from_none(served * room), _from_none(tokens.mean(axis=1))

    def aggregated(self) -> tuple[Shares, Shares]:
        """First tokens and tokens in time, by the number of workers that do both."""
        offer, load = self._offer, self._load
        steps = np.ceil(self._prompts / offer.max_batched_tokens)
        busy = np.minimum(_FULL, load.rate * self._prompt_seconds.mean() / self._counts)  # of a worker, with prompts
        # Beside prompts' steps, which give each answer a token too, fewer steps of answers alone have time.
        mixed_rate = np.minimum(load.rate / self._counts * steps.mean(), 1 / self._step)
        mixed_seconds = self._prompt_seconds.mean() / steps.mean()
        stretched = self._step * (1 - busy) + mixed_seconds * busy
        running, served = self._running(np.minimum(self._step / (1 - busy), stretched / (1 - busy)), self._each)
        decodes = self._each * running[:, None]
        seconds = self._prompt_seconds[None, :] + steps[None, :] * decodes
        first = self._first_tokens(seconds, self._arrivals[None, :] + self._step / 2 + decodes / 2)
        alone = self._step + self._each * running
        outputs = np.maximum(2.0, load.output_tokens * _QUANTILES)[None, :]
        # Prompts' steps while an answer of so many tokens goes on, a Poisson's number, each longer by so much.
        longer = max(0.0, mixed_seconds - self._step)
        lasts = outputs * (alone / np.maximum(1 - busy, 1 - _FULL))[:, None]
        number = mixed_rate[:, None] * lasts
        mean, spread = number * longer / outputs, np.sqrt(number) * longer / outputs
        tokens = self._tokens_in_time(running[:, None], self._tpot - mean, spread)
        return first, _from_none(served * tokens.mean(axis=1))

    def _first_tokens(self, seconds: NDArray[np.float64], before: NDArray[np.float64]) -> Shares:
        """`seconds` `[workers or 1, prompts]` that prompts take on one of the workers, and `before` they begin."""
        mean = seconds.mean(axis=1)
        rho = self._load.rate * mean / self._counts
        served = np.minimum(1.0, _FULL / np.maximum(rho, 1e-12))
        rho = rho * served
        waits = rho ** (np.sqrt(2 * (self._counts + 1)) - 1)
        wait = mean * (1 + _SPREAD) / 2 / (self._counts * (1 - rho))
        left = self._ttft - before - seconds
        late = waits[:, None] * np.exp(-np.maximum(left, 0.0) / np.maximum(wait, 1e-12)[:, None])
        return _from_none(served * np.where(left < 0, 0.0, 1 - late).mean(axis=1))

    def _running(self, step: NDArray[np.float64] | float, each: float) -> tuple[NDArray[np.float64], Shares]:
        """Sequences on a worker, and the share of the load for which there is room, by number of workers."""
        tokens = self._load.rate * self._load.output_tokens / self._counts  # a second, of a worker
        most = self._together / (step + self._together * each)
        served = np.minimum(1.0, _FULL * most / np.maximum(tokens, 1e-12))
        tokens = tokens * served
        return np.minimum(self._together, tokens * step / (1 - tokens * each)), served

    def _tokens_in_time(
        self, running: NDArray[np.float64], seconds: NDArray[np.float64] | float, spread: NDArray[np.float64] | float
    ) -> NDArray[np.float64]:
        off = np.sqrt(np.maximum(running, 0.0)) * self._each
        total = np.sqrt(np.square(off) + np.square(spread)) + 1e-9
        shares: NDArray[np.float64] = _normal((seconds - self._step - running * self._each) / total)
        return shares


@lru_cache(maxsize=64)  # many rates are looked at with the same prompts
def _seconds(timing: Timing, chunk: int, behind: float, prompts: tuple[float, ...]) -> tuple[float, ...]:
    """That prompts of so many tokens take behind so many that are cached."""
    return tuple(timing.prompt(round(behind), round(behind + tokens), chunk) for tokens in prompts)


def _from_none(shares: NDArray[np.float64]) -> Shares:
    return np.concatenate(([0.0], np.broadcast_to(shares, shares.shape)))


def _normal(at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution, within 1e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    x = np.abs(at) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * np.exp(-np.square(x))
    shares: NDArray[np.float64] = np.where(at < 0, tail, 1 - tail)
    return shares
