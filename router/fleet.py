"""The workers of a cluster as one table: a row for each, its place never changes while the worker is there.

Policies look at whole columns, so that a decision over 1,000 workers is a few vector operations. The row's number is
the worker's bit in the block index.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.request import TIERS

# Coefficients of the predicted seconds (router.cost): to the first token, and for each token after it. What a worker
# has as long as nothing is known of its like.
TTFT_PRIOR = np.array([0.005, 1.0, 1.0, 1.0, 0.05])
TPOT_PRIOR = np.array([0.008, 1e-4, 1e-7, 0.002])
NUM_TTFT, NUM_TPOT = len(TTFT_PRIOR), len(TPOT_PRIOR)
NUM_SOURCES = 1 + len(TIERS)  # kinds of holders: workers, and each tier of a KV service

WORKER = np.dtype(
    [
        ("worker", "S32"),  # incarnation
        ("ready", "?"),  # may get requests
        ("shut", "?"),  # gets none for now where there is another, as it fails (router.health)
        ("prefills", "?"),  # is a prefill worker
        ("decodes", "?"),  # is a decode or aggregated worker
        ("aggregated", "?"),
        ("tier", "i4"),  # of a KV service it is what is no further away than there, 1 + place in TIERS; 0: a worker
        ("fetches", "?"),  # can take what others have cached
        ("sends", "?"),  # others can take what it has cached
        ("model", "i4"),  # a number for each model
        ("layout", "i4"),  # a number for each layout of blocks
        ("block_size", "i4"),  # tokens
        ("taken", "i8"),  # number of the latest decision that took it; 0: none has
        ("requests", "i4"),  # booked
        ("prefill_tokens", "f8"),  # booked: to be computed of prompts
        ("decode_tokens", "f8"),  # booked: whose KV is kept
        ("queue", "f8"),  # of prefill_tokens, as predicted at `queue_at`
        ("queue_at", "f8"),  # monotonic seconds
        ("waiting_for_blocks", "i4"),  # requests that cannot start there for want of KV blocks
        ("free_tokens", "f8"),  # of KV, as told, less what was booked since; inf: not told
        ("prefill_rate", "f8"),  # tokens per second that it computes of prompts; NaN: not measured
        # That it fetches from workers, and where each tier is the furthest; 0: none came in time, NaN: not measured.
        ("fetch_rate", "f8", NUM_SOURCES),
        ("regret", "f8"),  # prompt tokens that will be computed once more for each that it stores (router.regret)
        ("ttft", "f8", NUM_TTFT),  # coefficients, see above
        ("tpot", "f8", NUM_TPOT),
    ],
    align=True,
)
_ROWS = 16  # at first


class Fleet:
    """The table, which row is whose, and which layout has which number. Rows of workers that left are used again.

    A KV service has a row for each tier, which holds what is in that tier or a nearer one.
    """

    def __init__(self) -> None:
        self.table: NDArray[np.void] = np.zeros(_ROWS, WORKER)
        self._rows_of: dict[str, dict[int, int]] = {}  # by tier
        self._free = list(range(_ROWS))[::-1]
        self._numbers: dict[Hashable, int] = {}

    def join(self, worker: str, tier: int = 0) -> int:
        """The row of a worker or of a KV service's tier, an empty one for a new one."""
        rows = self._rows_of.setdefault(worker, {})
        row = rows.get(tier)
        if row is None:
            if not self._free:
                size = len(self.table)
                self.table = np.concatenate([self.table, np.zeros(size, WORKER)])
                self._free = list(range(size, 2 * size))[::-1]
            row = rows[tier] = self._free.pop()
            self.set(row, worker=worker.encode(), tier=tier, ttft=TTFT_PRIOR, tpot=TPOT_PRIOR, fetch_rate=np.nan)
        return row

    def set(self, row: int, **columns: Any) -> None:
        """Writes columns of a row."""
        for name, value in columns.items():
            self.table[name][row] = value

    def leave(self, worker: str) -> None:
        """Empties all rows of a worker or KV service."""
        for row in self._rows_of.pop(worker).values():
            self.table[row] = np.zeros((), WORKER)
            self._free.append(row)

    def row(self, worker: str) -> int | None:
        """Where a worker stands; None: it is not there."""
        return next(iter(self.rows(worker)), None)

    def rows(self, worker: str) -> list[int]:
        """All of them."""
        return list(self._rows_of.get(worker, {}).values())

    def pools(self) -> Iterator[NDArray[np.bool_]]:
        """The workers of one role and one model, `[n]`, for each of them: only these can be compared."""
        for role in ("prefills", "decodes"):
            members, models = self.table[role], self.table["model"]
            for model in sorted(set(models[members].tolist())):
                yield members & (models == model)

    def model(self, name: str) -> int:
        """The number of a model."""
        return self._numbers.setdefault(("model", name), len(self._numbers))

    def layout(self, name: str) -> int:
        """The number of a layout."""
        return self._numbers.setdefault(name, len(self._numbers))
