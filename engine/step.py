"""What one step of the engine computes."""

from collections import Counter
from dataclasses import dataclass, field

from engine.request import Request
from engine.sequence import Sequence


@dataclass(slots=True)
class Entry:
    """Compute tokens [start, start + num_tokens) of one sequence."""

    sequence: Sequence
    start: int
    num_tokens: int
    blocks: list[int] = field(init=False, compare=False)  # the sequence's own list, in which they are computed

    def __post_init__(self) -> None:
        """Looks at what the sequence has now."""
        self.blocks = self.sequence.block_ids

    @property
    def stands(self) -> bool:
        """Whether the sequence has its blocks still: it has neither ended since, nor been preempted."""
        return self.sequence.block_ids is self.blocks

    @property
    def end(self) -> int:
        """First token not computed by this entry."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the sequence's last token is computed, so that the next can be sampled. Changes once it is."""
        return self.end == len(self.sequence.token_ids)


@dataclass(slots=True)
class Step:
    """What one step computes, decodes first, and what happened since the last one."""

    entries: list[Entry] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)  # without computing
    fetches: list[Request] = field(default_factory=list)  # reserved, see `Scheduler.rather_fetch`
    # Preempted sequences that went on, as their KV was "swapped" or "recomputed", or "ended" before.
    preempted: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(entry.num_tokens for entry in self.entries)
