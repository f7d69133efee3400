"""Whether the beginning of a prompt is better fetched from a worker that has it cached than computed once more.

A pure function, as `router.policy`. What it says is a hint: who is told waits no longer than it would compute, and
computes what does not come.
"""

import numpy as np

from router.snapshot import Ask, Snapshot


def source_for(computing: int, ask: Ask, snapshot: Snapshot, *, fetch_tokens: int) -> int | None:
    """The worker from which `computing` is to fetch; None: none has `fetch_tokens` more of the prompt, or it is slower.

    Only blocks of equal layout are exchanged: others would be rounded, or packed anew. Where nothing was measured a
    fetch is tried, as it can only be measured then. 0 `fetch_tokens`: never.
    """
    table, own = snapshot.table, snapshot.table[computing]
    if not fetch_tokens or ask.local_prefill_only or not own["fetches"]:
        return None
    able = table["ready"] & table["sends"] & (table["layout"] == own["layout"])
    able[computing] = True  # what it has itself is the least that another must have
    blocks = np.where(able, snapshot.cached_blocks, -1)
    most = np.flatnonzero(blocks == blocks.max())
    best = int(most[table["prefill_tokens"][most].argmin()])
    missing, missing_there = ask.uncached(snapshot.cached_tokens[[computing, best]])
    if missing - missing_there < fetch_tokens:
        return None
    # Both would move or compute the same tokens, so the rates decide. NaN, not measured, is not slower.
    return None if own["fetch_rate"] <= own["prefill_rate"] else best
