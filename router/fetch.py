"""Whether the beginning of a prompt is better fetched from who has it cached than computed once more.

Pure functions, as `router.policy`. What they say is a hint: who is told waits no longer than it would compute, and
computes what does not come.
"""

import numpy as np
from numpy.typing import NDArray

from router.fleet import NUM_SOURCES
from router.snapshot import Ask, Snapshot

MOVED = 4.0  # times as fast KV is moved as computed, as long as that is not measured
_DISTURBED = 0.1  # of what is saved, by a worker that sends: it has its own steps meanwhile


def fetchable_tokens(
    ask: Ask, table: NDArray[np.void], cached_blocks: NDArray[np.int32], *, fetch_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Prompt tokens that each worker is to fetch, `[n]`; 0: none has `fetch_tokens` more of it, or that is slower.

    And from which kind of holder (column `tier`): the one that saves most time, as what is further away may be more,
    and slower. Only blocks of equal layout are exchanged: others would be rounded, or packed anew. 0 `fetch_tokens`:
    never.
    """
    most, tiers = np.zeros(len(table), np.int64), np.zeros(len(table), np.intp)
    if not fetch_tokens or ask.local_prefill_only:
        return most, tiers
    holds = cached_blocks > 0
    if not holds.any():
        return most, tiers
    missing = ask.uncached(cached_blocks * table["block_size"])
    senders = table["ready"] & ~table["shut"] & table["sends"] & holds
    saved = np.zeros(len(table))
    kinds = table["tier"]
    workers, *nearest_first = np.bincount(kinds[senders], minlength=NUM_SOURCES).tolist()
    # Workers last: of equals a KV service, which computes nothing meanwhile, and its nearest tier.
    present = [*(tier for tier, rows in enumerate(nearest_first, 1) if rows), *([0] if workers else [])]
    for tier in present:
        those = senders & (kinds == tier)
        least = missing.copy()
        for layout in set(table["layout"][those].tolist()):
            same = table["layout"] == layout
            least[same] = np.minimum(least[same], missing[those & same].min())
        more = missing - least
        with np.errstate(divide="ignore", invalid="ignore"):  # what is measured as 0 saves less than nothing
            slower = table["prefill_rate"] / table["fetch_rate"][:, tier]
            slower[np.isnan(slower)] = 1.0 / MOVED
            saves = more * (1.0 - slower)  # in times to compute a token
        if not tier:
            saves *= 1.0 - _DISTURBED
        better = (saves > saved) & (more >= fetch_tokens) & table["fetches"]
        np.copyto(most, more, where=better)
        np.copyto(saved, saves, where=better)
        tiers[better] = tier
    return most, tiers


def source_for(computing: int, snapshot: Snapshot) -> int | None:
    """The row from which `computing` is to fetch; None: it has nothing to fetch. Of equals the least busy one.

    That is who has the fewest prompt tokens left to compute, and then the fewest requests.
    """
    if not snapshot.fetchable_tokens[computing]:
        return None
    table = snapshot.table
    able = table["ready"] & ~table["shut"] & table["sends"] & (table["layout"] == table["layout"][computing])
    able &= table["tier"] == snapshot.tiers[computing]
    blocks = np.where(able, snapshot.cached_blocks, -1)
    most = np.flatnonzero(blocks == blocks.max())
    # What is booked stays so until answers end; a prompt that was computed keeps nobody waiting any more.
    busy = np.lexsort((table["requests"][most], snapshot.queued_tokens[most]))
    return int(most[busy[0]])
