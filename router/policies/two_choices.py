"""Of two workers drawn at random the one with less to do.

The second choice keeps queues nearly as even as looking at all would, and many routers with an old view of the cluster
do not all run to the same idle worker.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.policies.least_outstanding import least_outstanding
from router.snapshot import Ask, Snapshot


def two_choices(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Tokens booked on the two; the others cost more than anything."""
    count = len(workers.table)
    costs = np.full(count, np.inf)
    drawn = draw.rng.choice(count, size=min(2, count), replace=False)
    costs[drawn] = least_outstanding(ask, workers.take(drawn), draw)
    return costs
