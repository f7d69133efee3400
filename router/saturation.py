"""Whether the cluster has room: some worker, or pair of workers, could begin with one more request soon.

A worker that computes prompts has room while what is queued there takes less than some seconds; one that keeps KV,
while no request waits for blocks there and the tokens fit those that are free. A worker without requests always has.
Several routers see each other's bookings a moment late, and may each give the last room away; workers hold the excess.
"""

import numpy as np
from numpy.typing import NDArray

from router.snapshot import Ask

BUSY_SECONDS = 2.0  # of queued prompts: more would wait where nobody can order it, less might leave the worker idle
_UNMEASURED = 4096.0  # tokens per second of a worker that has not computed enough to tell
_OUTPUT = 512  # tokens: most answers end before, whatever their clients allow


def kept_tokens(ask: Ask) -> int:
    """Tokens whose KV a request will keep, as far as one can say beforehand."""
    return ask.prompt_tokens + min(ask.max_tokens, _OUTPUT)


def has_room(ask: Ask, table: NDArray[np.void], queued_tokens: NDArray[np.float64]) -> bool:
    """Of the fleet's workers, `[n]` each. Where all that decode are shut out there is nothing to wait for: True."""
    ready = table["ready"] & ~table["shut"]
    decodes = ready & table["decodes"]
    if not decodes.any():
        return True
    free = (table["waiting_for_blocks"] == 0) & (table["free_tokens"] >= kept_tokens(ask))
    keeps = decodes & (free | (table["requests"] == 0))
    quick = queued_tokens <= BUSY_SECONDS * prefill_rates(table)
    prefills = ready & table["prefills"]
    if ask.local_prefill_only or not prefills.any():
        return bool((keeps & quick).any())
    aggregated = table["aggregated"]
    return bool((keeps & aggregated & quick).any() or ((keeps & ~aggregated).any() and (prefills & quick).any()))


def computing(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """The workers that compute prompts, `[n]`: prefill and aggregated ones, or all where there are none."""
    ready = table["ready"] & ~table["shut"]
    able: NDArray[np.bool_] = ready & (table["prefills"] | table["aggregated"])
    return able if able.any() else ready & table["decodes"]


def prefill_rates(table: NDArray[np.void]) -> NDArray[np.float64]:
    """Prompt tokens per second of each worker, `[n]`."""
    rates: NDArray[np.float64] = np.nan_to_num(table["prefill_rate"], nan=_UNMEASURED)
    return rates
