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

from router.fetch import MOVED
from router.fleet import NUM_TPOT, NUM_TTFT
from router.snapshot import Ask, Snapshot

_RATE = 10_000.0  # tokens per second that a worker computes, as long as none has measured
_WAIT, _OWN, _FETCH, _BLOCKED = 1, 2, 3, 4  # places of coefficients

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
    regret: Floats  # to compute once more what goes for the prompt
    transfer: Floats  # to get the KV of the prompt from the worker that computes it, if that is another one
    blocked: Floats  # requests that wait for KV blocks
    requests: Floats  # with this one
    kept: Floats  # tokens, with this prompt

    def computing(self, at: int) -> tuple[float, ...]:
        """Of the TTFT of one worker that computes the prompt and decodes, NUM_TTFT."""
        return 1.0, float(self.wait[at]), float(self.own[at]), float(self.fetch[at]), float(self.blocked[at])

    def receiving(self, at: int) -> tuple[float, ...]:
        """Of the TTFT's part that the decode worker adds where another one computes, NUM_TTFT."""
        return 1.0, 0.0, 0.0, float(self.transfer[at]), float(self.blocked[at])

    def decoding(self, at: int, *, local: bool) -> tuple[float, ...]:
        """Of the TPOT, NUM_TPOT. `local`: the prompt is computed there, too."""
        prompts = float(self.wait[at] + self.own[at]) if local else float(self.wait[at])
        return 1.0, float(self.requests[at]), float(self.kept[at]), prompts


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
    # The fleet's: one worker's varies with the prompts that it had, and that it is slow its coefficients tell.
    rate = _RATE if math.isnan(workers.prefill_rate) else workers.prefill_rate
    peers = workers.fetch_rates[0]
    moved = MOVED * rate if math.isnan(peers) else peers
    missing = ask.uncached(workers.cached_tokens)
    unexpected = ask.uncached(workers.expected_tokens)
    coming = unexpected / rate
    rates = np.where(np.isnan(workers.fetch_rates), moved, workers.fetch_rates)
    fetch = workers.fetchable_tokens / rates[workers.tiers]
    own = (missing - workers.fetchable_tokens) / rate
    sooner = (coming <= own + fetch) & awaits
    return Features(
        wait=workers.queued_tokens / rate,
        own=np.where(sooner, coming, own),
        fetch=np.where(sooner, 0.0, fetch),
        regret=table["regret"] * unexpected / rate,
        transfer=unexpected / moved,
        blocked=table["waiting_for_blocks"].astype(np.float64),
        requests=table["requests"] + 1.0,
        kept=table["decode_tokens"] + ask.prompt_tokens,
    )


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
    later = _BEHIND * work + (1.0 + _BEHIND) * of[_OWN] * there.regret
    return fixed + of[_WAIT] * there.wait + work, fixed + queued + work + later


def _missed(predicted: Floats, objective: float) -> Floats | float:
    return 0.0 if math.isinf(objective) else np.where(predicted > objective, _MISSED, 0.0)


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
    # The answers that run there take longer with this one: what fills up, fills up evenly, though no objective is met.
    slowed = streams * table["requests"] * (per[1] + per[2] * ask.prompt_tokens)
    transfer = of[0] + of[_FETCH] * there.transfer + of[_BLOCKED] * there.blocked
    ttft_remote = elsewhere.ttft + transfer
    cost_here = prompt_here + streams * tpot_here + slowed
    cost_here += _missed(here, objectives.ttft) + _missed(tpot_here, objectives.tpot)
    regret = (1.0 + _BEHIND) * of[_OWN] * there.regret
    cost_remote = elsewhere.cost + transfer + regret + streams * tpot_remote + slowed
    cost_remote += _missed(ttft_remote, objectives.ttft) + _missed(tpot_remote, objectives.tpot)
    local = table["aggregated"] | (cost_here + (_LOCAL - 1.0) * prompt_here < cost_remote)
    return Costs(np.where(local, cost_here, cost_remote), np.where(local, here, ttft_remote), local)


def alike(ask: Ask, workers: Snapshot, costs: Floats, tolerance: float) -> NDArray[np.intp]:
    """The rows among which chance may decide, as predictions are not exact.

    They cost no more than the share `tolerance` above the least, objectives aside, and of those that do they have the
    fewest prompt tokens to compute first, within the same share of the prompt: so one that has it cached wins.
    """
    least = float(costs.min())
    (close,) = (costs <= least + tolerance * (least % _MISSED)).nonzero()
    if len(close) == 1:
        return close
    tokens = workers.queued_tokens[close] + (1.0 + _BEHIND) * ask.uncached(workers.expected_tokens[close])
    fewest: NDArray[np.intp] = close[tokens <= tokens.min() + tolerance * ask.prompt_tokens]
    return fewest


def predict(ask: Ask, decode: Snapshot, prefill: Snapshot | None) -> Prediction:
    """Of a placement on the first worker of `decode`, the prompt computed by the first of `prefill`, if any."""
    there = features(ask, decode)
    computing = (there if prefill is None else features(ask, prefill)).computing(0)
    coefficients = (decode if prefill is None else prefill).table["ttft"]
    ttft = float(coefficients[0] @ np.array(computing))
    receiving: tuple[float, ...] = ()
    if prefill is not None:
        receiving = there.receiving(0)
        ttft += float(decode.table["ttft"][0] @ np.array(receiving))
    decoding = there.decoding(0, local=prefill is None)
    tpot = float(decode.table["tpot"][0] @ np.array(decoding))
    assert len(computing) == NUM_TTFT and len(decoding) == NUM_TPOT
    return Prediction(ttft, tpot, computing, receiving, decoding)
