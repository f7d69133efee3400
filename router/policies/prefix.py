"""The least work before this request and of it, in tokens to compute: what is cached need not be computed.

Before it: prompt tokens that are queued; tokens whose KV is kept for running answers, of which each slows this request
far less; and requests that wait for KV blocks. Of it: the tokens that are neither cached nor on their way, less what a
fetch from another worker spares. To wait until another request has computed a prefix takes as long as to compute it
here; but a token computed once more also delays whatever comes behind.

A prefix that all ask for stays with its worker as long as this has its share of the requests and some more; then it
spreads, before the worker has more to decode than it can at once.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot

_OWN = 1.25  # cost of a token of this request
_KEPT = 0.125  # of a token kept
_WAITING = 512.0  # of a request that waits for blocks: one is freed about as often as so many tokens are computed
_FETCHED = 0.25  # of a token fetched, as long as the rates are not measured
_SHARE, _MORE = 1.25, 8  # requests on one worker: so many times the mean, and so many more


def prefix(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Tokens; no worker with far more than its share is taken, which leaves at least the one with the fewest."""
    table = workers.table
    before = workers.queued_tokens + _KEPT * table["decode_tokens"] + _WAITING * table["waiting_for_blocks"]
    fetched = np.full(len(table), _FETCHED)
    both_measured = (table["prefill_rate"] > 0) & (table["fetch_rate"] > 0)
    np.divide(table["prefill_rate"], table["fetch_rate"], out=fetched, where=both_measured)
    with_fetch = ask.uncached(workers.cached_tokens) - workers.fetchable_tokens * (1 - fetched)
    own = np.minimum(ask.uncached(workers.expected_tokens), with_fetch)
    crowded = table["requests"] > _SHARE * table["requests"].mean() + _MORE
    return np.where(crowded, np.inf, before + _OWN * own)
