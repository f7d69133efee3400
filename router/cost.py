"""Seconds that a placement is predicted to take: to the first token, and for each token after it.

Both are linear in what is known of the workers when it is decided. A worker's coefficients are columns of the fleet's
table, fitted to what happened (`router.fit`):

- TTFT: 1, seconds for which other prompts keep the worker that computes this one, seconds that this one takes itself,
  seconds in which KV is moved to it, and requests that wait there for KV blocks. Seconds are tokens through the mean
  of the rates that workers measure. Where another worker decodes, the transfer to it and those who wait for its blocks
  come on top.
- TPOT: 1, requests and tokens whose KV is kept, and seconds of prompts to compute beside them.

What is neither cached nor fetched may be on its way: then to wait for it is in the queue already.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.fleet import NUM_TPOT, NUM_TTFT
from router.snapshot import Ask, Snapshot

_RATE = 10_000.0  # tokens per second that a worker computes, as long as none has measured
_WAIT, _OWN, _FETCH, _BLOCKED = 1, 2, 3, 4  # places of coefficients
_MOVED = 4.0  # times as fast KV is moved, as long as that is not measured

_BEHIND = 0.25  # worth of a second for which prompts behind this one wait
_STREAM = 0.5  # worth of a second that an answer takes longer
_OUTPUT = 256  # tokens; of an answer, no more count
_LOCAL = 2.0  # a decode worker computes a prompt itself where another would cost so many times as much
_MISSED = 1e6  # seconds that an objective is worth: those that meet it come first

Floats = NDArray[np.float64]


class Objectives(NamedTuple):
    """Seconds that shall not be exceeded."""

    ttft: float = math.inf
    tpot: float = math.inf


class Elsewhere(NamedTuple):
    """Another worker that would compute the prompt."""

    ttft: float  # predicted seconds there
    cost: float


NOWHERE = Elsewhere(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Features:
    """What the predictions for each worker are made of, `[n]` each, in seconds unless said otherwise."""

    wait: Floats  # for prompts that are queued there
    own: Floats  # to compute this one
    fetch: Floats  # to get what another worker has
    transfer: Floats  # to get the KV of the prompt from the worker that computes it, if that is another one
    blocked: Floats  # requests that wait for KV blocks
    requests: Floats  # with this one
    kept: Floats  # tokens, with this prompt

    def computing(self) -> Floats:
        """Of the TTFT where the prompt is computed and decoded, `[n, NUM_TTFT]`."""
        return np.stack([np.ones_like(self.wait), self.wait, self.own, self.fetch, self.blocked], axis=1)

    def receiving(self) -> Floats:
        """Of the TTFT's part that the decode worker adds where another one computes, `[n, NUM_TTFT]`."""
        zero = np.zeros_like(self.wait)
        return np.stack([np.ones_like(zero), zero, zero, self.transfer, self.blocked], axis=1)

    def decoding(self, *, local: bool) -> Floats:
        """Of the TPOT, `[n, NUM_TPOT]`. `local`: the prompt is computed there, too."""
        prompts = self.wait + self.own if local else self.wait
        return np.stack([np.ones_like(prompts), self.requests, self.kept, prompts], axis=1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one placement: what is expected, and the features from which it follows, to learn from what will happen."""

    ttft: float = float("nan")  # seconds
    tpot: float = float("nan")
    computing: tuple[float, ...] = ()  # of NUM_TTFT
    receiving: tuple[float, ...] = ()  # of NUM_TTFT; (): the computing worker decodes
    decoding: tuple[float, ...] = ()  # of NUM_TPOT


def features(ask: Ask, workers: Snapshot, awaits: NDArray[np.bool_] | bool = True) -> Features:
    """Of giving the request to each of the workers. `awaits`, `[n]`: whether what is expected there will be computed
    there, and so is in the queue."""
    table = workers.table
    rate = _mean(table["prefill_rate"], _RATE)
    moved = _mean(table["fetch_rate"], _MOVED * rate)
    missing = ask.uncached(workers.cached_tokens)
    coming = ask.uncached(workers.expected_tokens) / rate
    fetch, own = workers.fetchable_tokens / moved, (missing - workers.fetchable_tokens) / rate
    sooner = (coming <= own + fetch) & awaits
    return Features(
        wait=workers.queued_tokens / rate,
        own=np.where(sooner, coming, own),
        fetch=np.where(sooner, 0.0, fetch),
        transfer=ask.uncached(workers.expected_tokens) / moved,
        blocked=table["waiting_for_blocks"].astype(np.float64),
        requests=table["requests"] + 1.0,
        kept=table["decode_tokens"] + ask.prompt_tokens,
    )


def _mean(rates: Floats, prior: float) -> float:
    """Of those measured. One worker's varies with the prompts that it had; that it is slow its coefficients tell."""
    measured = rates[rates > 0]
    return float(measured.mean()) if len(measured) else prior


class Costs(NamedTuple):
    """Of giving the request to each worker, `[n]` each."""

    cost: Floats  # seconds
    ttft: Floats  # predicted
    local: NDArray[np.bool_]  # the worker rather computes the prompt itself


def prefill_costs(ask: Ask, workers: Snapshot, objectives: Objectives) -> Costs:
    """Of having them compute the prompt for another worker."""
    there, of = features(ask, workers), np.ascontiguousarray(workers.table["ttft"].T)
    ttft, cost = _computed(of, there)
    return Costs(cost + _missed(ttft, objectives.ttft), ttft, np.ones(len(ttft), np.bool_))


def _computed(of: Floats, there: Features) -> tuple[Floats, Floats]:
    """Seconds to the first token with coefficients `[NUM_TTFT, n]`, and those with what others wait longer for it.

    Others are those that come behind this prompt and those that it overtakes: what is queued costs in whole, though a
    short prompt does not wait for all of it.
    """
    fixed = of[0] + of[_FETCH] * there.fetch + of[_BLOCKED] * there.blocked
    work = of[_OWN] * there.own
    queued = of[_OWN] * there.wait
    return fixed + of[_WAIT] * there.wait + work, fixed + queued + (1.0 + _BEHIND) * work


def _missed(predicted: Floats, objective: float) -> Floats:
    missed: Floats = np.where(predicted > objective, _MISSED, 0.0)
    return missed


def decode_costs(ask: Ask, workers: Snapshot, objectives: Objectives, elsewhere: Elsewhere) -> Costs:
    """Of having them decode, and compute the prompt where that is better than `elsewhere`.

    A prompt that is computed on a decode worker stops its answers for as long. So elsewhere is better unless that takes
    far longer: what a worker's load tells is never all that it will have to do.
    """
    table = workers.table
    there = features(ask, workers, table["aggregated"] | math.isinf(elsewhere.cost))
    of, per = np.ascontiguousarray(table["ttft"].T), np.ascontiguousarray(table["tpot"].T)
    here, prompt_here = _computed(of, there)
    prompt_here += np.where(table["aggregated"], 0.0, _STREAM * of[_OWN] * there.own * table["requests"])
    streams = min(ask.max_tokens, _OUTPUT) * _STREAM
    tpot_remote = per[0] + per[1] * there.requests + per[2] * there.kept + per[3] * there.wait
    tpot_here = tpot_remote + per[3] * there.own
    transfer = of[0] + of[_FETCH] * there.transfer + of[_BLOCKED] * there.blocked
    ttft_remote = elsewhere.ttft + transfer
    cost_here = prompt_here + streams * tpot_here
    cost_here += _missed(here, objectives.ttft) + _missed(tpot_here, objectives.tpot)
    cost_remote = elsewhere.cost + transfer + streams * tpot_remote
    cost_remote += _missed(ttft_remote, objectives.ttft) + _missed(tpot_remote, objectives.tpot)
    local = table["aggregated"] | (cost_here + (_LOCAL - 1.0) * prompt_here < cost_remote)
    return Costs(np.where(local, cost_here, cost_remote), np.where(local, here, ttft_remote), local)


def predict(ask: Ask, decode: Snapshot, prefill: Snapshot | None) -> Prediction:
    """Of a placement on the first worker of `decode`, the prompt computed by the first of `prefill`, if any."""
    there = features(ask, decode)
    local = prefill is None
    computing = there.computing() if prefill is None else features(ask, prefill).computing()
    coefficients = (decode if prefill is None else prefill).table["ttft"]
    ttft = float(coefficients[0] @ computing[0])
    receiving: tuple[float, ...] = ()
    if not local:
        received = there.receiving()[0]
        ttft += float(decode.table["ttft"][0] @ received)
        receiving = tuple(received.tolist())
    decoding = there.decoding(local=local)[0]
    tpot = float(decode.table["tpot"][0] @ decoding)
    assert computing.shape[1] == NUM_TTFT and len(decoding) == NUM_TPOT
    return Prediction(ttft, tpot, tuple(computing[0].tolist()), receiving, tuple(decoding.tolist()))
