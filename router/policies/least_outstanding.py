"""The worker with the fewest tokens booked, whatever it has cached."""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def least_outstanding(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Tokens to be computed and kept by requests under way."""
    tokens: NDArray[np.float64] = workers.table["prefill_tokens"] + workers.table["decode_tokens"]
    return tokens
