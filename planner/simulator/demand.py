"""What comes to a simulated cluster: requests with times, lengths and the chained hashes of their blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.simulator.job import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Demand:
    """One request. `hashes`: of the full blocks of prompt and answer; a prompt's are the first of them.

    `follows`: place of the request whose answer comes before; None: it begins a conversation. `think`: seconds between
    that answer and this request.
    """

    prompt_tokens: int
    output_tokens: int
    hashes: list[bytes]
    follows: int | None = None
    think: float = 0.0
    block_size: int = BLOCK_SIZE  # tokens

    @property
    def prompt_hashes(self) -> list[bytes]:
        """What a gateway can hash."""
        return self.hashes[: self.prompt_tokens // self.block_size]

    @property
    def cacheable(self) -> list[bytes]:
        """What need not be computed of a prompt if it is found: the last token always is."""
        return self.hashes[: (self.prompt_tokens - 1) // self.block_size]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times."""

    name: str
    demands: list[Demand]
    times: NDArray[np.float64]  # seconds since the first one, at the trace's own speed

    @property
    def own_rate(self) -> float:
        """Requests per second."""
        return len(self.times) / max(1e-9, float(self.times[-1]))

    def starts(self, rate: float) -> NDArray[np.float64]:
        """Times at which the requests come if so many come in a second on average."""
        return self.times * (self.own_rate / rate)

    @property
    def endless_hit_rate(self) -> float:
        """Share of the prompts' tokens that one cache which forgets nothing would hold."""
        return sum(self.endless_cached) / sum(demand.prompt_tokens for demand in self.demands)

    @property
    def endless_cached(self) -> list[int]:
        """Those tokens, of each prompt."""
        seen: set[bytes] = set()
        cached: list[int] = []
        for demand in self.demands:
            prompt = demand.prompt_hashes
            known = next((at for at, each in enumerate(prompt) if each not in seen), len(prompt))
            cached.append(min(known, (demand.prompt_tokens - 1) // demand.block_size) * demand.block_size)
            seen.update(demand.hashes)
        return cached
