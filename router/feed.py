"""The order of a worker's KV events: what to apply, what to ignore, when something is missing.

What is missing is asked for by number as long as the worker keeps it; else, and at first, everything is.
"""

from enum import Enum


class Verdict(Enum):
    """What to do with a batch of events."""

    APPLY = "apply"
    IGNORE = "ignore"  # seen already
    REPLAY = "replay"  # batches before it are missing: ask for all that follow `sequence`
    SNAPSHOT = "snapshot"  # nothing is known


class Feed:
    """The events of one incarnation of one worker."""

    def __init__(self) -> None:
        self.sequence: int | None = None  # last one applied; None: a snapshot is needed

    def judge(self, sequence: int) -> Verdict:
        """What to do with batch `sequence`; the batch counts as applied if the answer is APPLY."""
        if self.sequence is None:
            return Verdict.SNAPSHOT
        if sequence <= self.sequence:
            return Verdict.IGNORE
        if sequence > self.sequence + 1:
            return Verdict.REPLAY
        self.sequence = sequence
        return Verdict.APPLY

    def lags(self, sequence: int) -> bool:
        """Whether the worker has sent more, now that it says that batch `sequence` was its last."""
        return self.sequence is None or sequence > self.sequence

    def snapshot(self, sequence: int) -> None:
        """A snapshot that includes batch `sequence` was taken in."""
        self.sequence = sequence

    def forget(self) -> None:
        """What is missing cannot be had any more."""
        self.sequence = None
