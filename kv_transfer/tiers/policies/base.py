"""What a store asks of a policy. Policies keep books of hashes alone; bytes, slots and pins are the store's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Held = Callable[[bytes], bool]  # whether a block must not go now: pinned, or being read


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block that comes into a store."""

    key: bytes  # its hash
    position: int = 0  # blocks before it in its prompt
    parent: bytes = b""  # hash of the block before; empty: none, or not known
    owner: bytes = b""  # whose quota it counts for; empty: nobody's


class Policy(Protocol):
    """Which blocks go, and which are let in.

    Of a prompt's blocks the store tells the last one first, so that where nothing else speaks, tails go before heads.
    """

    def __len__(self) -> int:
        """Blocks that were inserted and neither evicted nor removed."""
        ...

    def admits(self, arrival: Arrival) -> bool:
        """Whether to store a block that is not there; asked once each time that it is offered."""
        ...

    def evict(self, arrival: Arrival, held: Held) -> bytes | None:
        """Forgets the block that goes for this one and names it; None if all are held, or worth more."""
        ...

    def insert(self, arrival: Arrival) -> None:
        """The block is there now, and was not before."""
        ...

    def touch(self, key: bytes) -> None:
        """A block that is there was used, or offered again."""
        ...

    def remove(self, key: bytes) -> None:
        """A block that is there is lost or deleted, which says nothing of its worth."""
        ...
