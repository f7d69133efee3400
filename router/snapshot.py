"""What a decision is made of: the request, and the workers at this moment as columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.fleet import NUM_SOURCES


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of the request."""

    prompt_tokens: int
    max_tokens: int
    local_prefill_only: bool = False
    session: int = 0  # 64 bits that stand for what should stay together
    model: int | None = None  # number of the model that a worker must have; None: any

    def uncached(self, cached_tokens: NDArray[Any]) -> NDArray[np.int64]:
        """Prompt tokens left to compute where that many leading ones are cached; the last one always."""
        left: NDArray[np.int64] = np.maximum(1, self.prompt_tokens - cached_tokens)
        return left


def mean_rates(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of those measured, over the workers `[n, ...]`; NaN: none is."""
    rates = np.array(rates.T, order="C")  # a copy, whose rows are summed far quicker
    measured = rates > 0
    rates[~measured] = 0.0
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = rates.sum(axis=-1) / measured.sum(axis=-1)
    return means


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Workers and what they hold of one request's prompt, `[n]` each."""

    table: NDArray[np.void]  # of router.fleet.WORKER
    cached_blocks: NDArray[np.int32]  # leading blocks of the prompt that a worker holds
    recalled_blocks: NDArray[np.int32]  # that it was given lately, told or not
    queued_tokens: NDArray[np.float64]  # of other prompts, that it has yet to compute
    fetchable_tokens: NDArray[np.int64]  # of the prompt, that it would better fetch from another than compute
    tiers: NDArray[np.intp]  # from which kind of holder, see router.fleet
    apart: Mapping[int, frozenset[int]] = field(default_factory=dict)  # decode row -> prefill rows that fail with it
    prefill_rate: float = math.nan  # mean of those that workers of the model have measured; NaN: none has
    fetch_rates: NDArray[np.float64] = field(default_factory=lambda: np.full(NUM_SOURCES, np.nan))  # likewise, by tier

    def take(self, rows: NDArray[np.intp]) -> "Snapshot":
        """These workers alone, in this order; for a policy, which is asked about those that may be taken."""
        # `take` copies whole rows, 20 times as fast as an index does.
        return Snapshot(
            self.table.take(rows),
            self.cached_blocks[rows],
            self.recalled_blocks[rows],
            self.queued_tokens[rows],
            self.fetchable_tokens[rows],
            self.tiers[rows],
            prefill_rate=self.prefill_rate,
            fetch_rates=self.fetch_rates,
        )

    @property
    def cached_tokens(self) -> NDArray[np.int32]:
        """Leading tokens of the prompt that each holds."""
        tokens: NDArray[np.int32] = self.cached_blocks * self.table["block_size"]
        return tokens

    @property
    def expected_tokens(self) -> NDArray[np.int32]:
        """Leading tokens of the prompt that each holds or will hold soon."""
        tokens: NDArray[np.int32] = np.maximum(self.cached_blocks, self.recalled_blocks) * self.table["block_size"]
        return tokens
