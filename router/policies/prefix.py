"""The fewest seconds, as predicted from what the workers have cached and to do (`router.cost`).

Workers that are predicted to meet the objectives come first. What counts is the time to the first token, in part the
time that the answer takes, and in part that which other requests take longer for it. A prefix that all ask for stays
with its worker until the answers that run there, or the prompts that wait, are predicted to take longer than to compute
or to fetch it elsewhere.

Predictions are not exact, and the worker that was a hair quicker must not get all that comes. So of those that cost
nearly the least, and have as much of the prompt, any is taken (`router.cost.alike`).
"""

import numpy as np
from numpy.typing import NDArray

from router.cost import decode_costs, prefill_costs
from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def prefix(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Seconds."""
    if workers.table["prefills"].any():
        return prefill_costs(ask, workers, draw.objectives).cost
    return decode_costs(ask, workers, draw.objectives, draw.elsewhere).cost
