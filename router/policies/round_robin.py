"""One worker after the other, in the order of the fleet's table."""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def round_robin(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """How many turns a worker has to wait."""
    count = len(workers.table)
    return ((np.arange(count) - draw.turn) % count).astype(np.float64)
