"""Whether the beginning of a prompt is better fetched from a worker that has it cached than computed once more.

Pure functions, as `router.policy`. What they say is a hint: who is told waits no longer than it would compute, and
computes what does not come.
"""

import numpy as np
from numpy.typing import NDArray

from router.snapshot import Ask, Snapshot


def fetchable_tokens(
    ask: Ask, table: NDArray[np.void], cached_blocks: NDArray[np.int32], *, fetch_tokens: int
) -> NDArray[np.int64]:
    """Prompt tokens that each worker is to fetch, `[n]`; 0: none has `fetch_tokens` more of it, or that is slower.

    Only blocks of equal layout are exchanged: others would be rounded, or packed anew. Where nothing was measured a
    fetch is tried, as it can only be measured then. 0 `fetch_tokens`: never.
    """
    if not fetch_tokens or ask.local_prefill_only:
        return np.zeros(len(table), np.int64)
    missing = ask.uncached(cached_blocks * table["block_size"])
    least = missing.copy()
    for layout in set(table["layout"][cached_blocks > 0].tolist()):
        same = table["ready"] & ~table["shut"] & (table["layout"] == layout)
        there = missing[same & table["sends"]].min(initial=ask.prompt_tokens)
        least[same] = np.minimum(least[same], there)
    # Both would move or compute the same tokens, so the rates decide. NaN, not measured, is not slower.
    able = table["fetches"] & ~(table["fetch_rate"] <= table["prefill_rate"])
    more = missing - least
    return np.where(able & (more >= fetch_tokens), more, 0)


def source_for(computing: int, snapshot: Snapshot) -> int | None:
    """The worker from which `computing` is to fetch; None: it has nothing to fetch. Of equals the least busy one."""
    if not snapshot.fetchable_tokens[computing]:
        return None
    table = snapshot.table
    able = table["ready"] & ~table["shut"] & table["sends"] & (table["layout"] == table["layout"][computing])
    blocks = np.where(able, snapshot.cached_blocks, -1)
    most = np.flatnonzero(blocks == blocks.max())
    return int(most[table["prefill_tokens"][most].argmin()])
