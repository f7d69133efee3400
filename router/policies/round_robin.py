"""One worker after the other: whoever has waited longest for a request.

Workers that come, go or are left out for a while do not upset the order, nor do requests that only some may take.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def round_robin(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """The number of the decision that took a worker last."""
    return workers.table["taken"].astype(np.float64)
