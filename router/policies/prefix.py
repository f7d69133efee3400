"""Tokens to compute before this request, and of this request: what is cached need not be computed.

To wait until another request has computed a prefix takes as long as to compute it here; but a token computed once more
also delays whatever comes behind, hence _OWN. A token kept for a running answer slows this request far less than one
that is prefilled before it, hence _KEPT.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot

_OWN = 1.25
_KEPT = 0.125


def prefix(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Cached blocks and load."""
    load = workers.table["prefill_tokens"] + _KEPT * workers.table["decode_tokens"]
    cost: NDArray[np.float64] = load + _OWN * ask.uncached(workers.expected_tokens)
    return cost
