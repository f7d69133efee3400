"""The order of a worker's KV events: what to apply, what to ignore, when to ask for everything anew."""

from enum import Enum


class Verdict(Enum):
    """What to do with a batch of events."""

    APPLY = "apply"
    IGNORE = "ignore"  # seen already
    RESYNC = "resync"  # something is missing: take a snapshot


class Feed:
    """The events of one incarnation of one worker. Nothing is known until the first snapshot, nor after a gap."""

    def __init__(self) -> None:
        self.sequence: int | None = None  # last one applied; None: a snapshot is needed

    def judge(self, sequence: int) -> Verdict:
        """What to do with batch `sequence`; the batch counts as applied if the answer is APPLY."""
        if self.sequence is None or sequence > self.sequence + 1:
            self.sequence = None
            return Verdict.RESYNC
        if sequence <= self.sequence:
            return Verdict.IGNORE
        self.sequence = sequence
        return Verdict.APPLY

    def snapshot(self, sequence: int) -> None:
        """A snapshot that includes batch `sequence` was taken in."""
        self.sequence = sequence
