"""The overlap formula that NVIDIA Dynamo published: weight x blocks to prefill + blocks kept, drawn by softmax.

Both counts are those that the worker would have with this request. Costs are scaled to 0 to 1 before the draw, so that
a temperature means the same at every load.
"""

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Draw
from router.snapshot import Ask, Snapshot


def overlap(ask: Ask, workers: Snapshot, draw: Draw) -> NDArray[np.float64]:
    """Blocks, in blocks kept; with a temperature, noise that makes the least a draw from the softmax."""
    table = workers.table
    to_prefill = table["prefill_tokens"] + ask.uncached(workers.cached_tokens)
    kept = table["decode_tokens"] + ask.prompt_tokens
    costs: NDArray[np.float64] = (draw.overlap.weight * to_prefill + kept) / table["block_size"]
    if not draw.overlap.temperature:
        return costs
    spread = costs.max() - costs.min()
    scaled = (costs - costs.min()) / (spread or 1.0)
    # The least of a cost less Gumbel noise is a draw with probabilities proportional to exp(-cost).
    drawn: NDArray[np.float64] = scaled / draw.overlap.temperature - draw.rng.gumbel(size=len(costs))
    return drawn
