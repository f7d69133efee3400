"""Any worker, evenly."""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def chance(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """All the same, so that the draw among equals decides."""
    return np.zeros(len(workers.table))
