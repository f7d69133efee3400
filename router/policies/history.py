"""Approximate prefixes: where this router sent the like of it before, without a word from the workers.

It does not see what workers evict, nor what other routers send; so only a long match counts, and none where the load
has become uneven. A miss goes to whom has least to do: an empty cache is no reason to send work.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.policies.least_outstanding import least_outstanding
from router.snapshot import Ask, Snapshot

_MATCH = 0.5  # of the prompt
_UNEVEN = 1.5, 32  # most requests on a worker against the fewest: so many times, and so many more


def history(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Tokens booked; where a match counts, for those with the longest match only."""
    costs = least_outstanding(ask, workers, draw)
    requests = workers.table["requests"]
    most, fewest = int(requests.max()), int(requests.min())
    if most > _UNEVEN[0] * fewest and most > fewest + _UNEVEN[1]:
        return costs
    matches = workers.recalled_blocks * workers.table["block_size"]
    longest = matches.max()
    return np.where(matches == longest, costs, np.inf) if longest > _MATCH * ask.prompt_tokens else costs
