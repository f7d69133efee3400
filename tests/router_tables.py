"""Small fleets for tests of decisions."""

import numpy as np

from router.fetch import fetchable_tokens
from router.fleet import TPOT_PRIOR, TTFT_PRIOR, WORKER
from router.snapshot import Ask, Snapshot, mean_rates

ASK = Ask(prompt_tokens=1000, max_tokens=100)
BLOCK = 16  # tokens


def worker(
    name: str,
    role: str = "decode",
    *,
    prefill: int = 0,
    decode: int = 0,
    requests: int = 0,
    cached: int = 0,
    soon: int = 0,
    size: int = BLOCK,
    **columns: float | list[float],
) -> tuple[np.void, int, int]:
    """A row and the prompt's blocks that it has and expects."""
    row = np.zeros((), WORKER)
    row["worker"], row["ready"], row["block_size"] = name.encode(), True, size
    row["prefills"], row["decodes"], row["aggregated"] = role == "prefill", role != "prefill", role == "aggregated"
    row["prefill_tokens"], row["decode_tokens"], row["requests"] = prefill, decode, requests
    row["fetches"] = row["sends"] = True
    row["prefill_rate"] = row["fetch_rate"] = np.nan
    row["ttft"], row["tpot"] = TTFT_PRIOR, TPOT_PRIOR
    for column, value in columns.items():
        row[column] = value
    return row[()], cached, soon


def snapshot(*workers: tuple[np.void, int, int], ask: Ask = ASK, fetch_tokens: int = 0) -> Snapshot:
    """What a decision looks at; all that is booked is queued."""
    table = np.zeros(len(workers), WORKER)
    for number, (row, _, _) in enumerate(workers):
        table[number] = row
    cached, recalled = ([each[column] for each in workers] for column in (1, 2))
    blocks = np.array(cached, np.int32)
    fetchable, tiers = fetchable_tokens(ask, table, blocks, fetch_tokens=fetch_tokens)
    queued = table["prefill_tokens"].copy()
    computed, fetched = mean_rates(table["prefill_rate"]), mean_rates(table["fetch_rate"])
    return Snapshot(table, blocks, np.array(recalled, np.int32), queued, fetchable, tiers, {}, float(computed), fetched)
