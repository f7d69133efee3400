"""Prefixes that are not to be given up for a while: whose, until when, and how much of a tier they may hold."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Limit = Literal["", "tenant", "all"]  # what stopped a pin from holding more

_MOST = 16_384  # pins of all
_MOST_OF_OWNER = 1024


@dataclass(frozen=True)
class Pin:
    """Blocks by hash, parents first. `owner`: the tenant whose share it counts for; None: nobody's."""

    hashes: tuple[bytes, ...]
    owner: str | None
    expires: float  # monotonic seconds; infinite: when it is ended

    @property
    def is_lasting(self) -> bool:
        """Whether it holds until somebody ends it."""
        return math.isinf(self.expires)


@dataclass(frozen=True)
class Granted:
    """What came of a wish: so many leading blocks are pinned for so long. `limit`: whose bound left out the rest."""

    blocks: int
    seconds: float
    limit: Limit


class Pins:
    """Books of pins by name: `most` blocks in all, `most_of_owner` for one owner, each for `longest` seconds.

    A block that several pins hold counts once. What changes has to be carried out by who keeps blocks: see `drain`.
    """

    def __init__(self, most: int, most_of_owner: int, longest: float) -> None:
        self.most = most
        self._most_of_owner = most_of_owner
        self._longest = longest
        self._pins: dict[str, Pin] = {}
        self._held: Counter[bytes] = Counter()  # by how many pins
        self._held_of: dict[str | None, Counter[bytes]] = {}  # the same by owner
        self._names_of: Counter[str | None] = Counter()  # pins by owner
        self._told: set[bytes] = set()  # as of the last `drain`
        self._touched: set[bytes] = set()  # since then

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def blocks(self) -> int:
        """That are pinned, whether they are there or not."""
        return len(self._held)

    def items(self) -> Iterable[tuple[str, Pin]]:
        """All pins by name, oldest first."""
        return self._pins.items()

    def pin(self, name: str, owner: str, hashes: Sequence[bytes], seconds: float, now: float) -> Granted:
        """Pins as many leading ones of these blocks as fit, in the place of what that name pinned before.

        A lasting pin of that name stays as it is.
        """
        if (old := self._pins.get(name)) is not None and old.is_lasting:
            return Granted(len(old.hashes), 0.0, "")
        self.release(name)
        if len(self._pins) >= _MOST:
            return Granted(0, 0.0, "all")
        if self._names_of[owner] >= _MOST_OF_OWNER:
            return Granted(0, 0.0, "tenant")
        count, limit = self._fitting(owner, hashes)
        seconds = min(seconds, self._longest)
        if not count:
            return Granted(0, 0.0, limit)
        self._put(name, Pin(tuple(hashes[:count]), owner, now + seconds))
        return Granted(count, seconds, limit)

    def keep(self, name: str, lasting: str) -> bool:
        """Makes of a pin a lasting one of another name, which counts for nobody. False: there is none."""
        pin = self._pins.get(name)
        if pin is None:
            return False
        self.release(name)
        self.release(lasting)
        self._put(lasting, Pin(pin.hashes, None, math.inf))
        return True

    def release(self, name: str) -> bool:
        """Ends a pin. False: there is none."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._names_of[pin.owner] -= 1
        own = self._held_of[pin.owner]
        for block_hash in set(pin.hashes):
            for held in (self._held, own):
                held[block_hash] -= 1
                if not held[block_hash]:
                    del held[block_hash]
        if not own:
            del self._held_of[pin.owner], self._names_of[pin.owner]
        self._touched.update(pin.hashes)
        return True

    def expire(self, now: float) -> int:
        """Ends what is over; how many pins that were."""
        over = [name for name, pin in self._pins.items() if pin.expires <= now]
        for name in over:
            self.release(name)
        return len(over)

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Blocks that are pinned now and were not at the last call, and those that are not any more."""
        pinned = [each for each in self._touched if each in self._held and each not in self._told]
        ended = [each for each in self._touched if each not in self._held and each in self._told]
        self._touched.clear()
        self._told.update(pinned)
        self._told.difference_update(ended)
        return pinned, ended

    def _fitting(self, owner: str, hashes: Sequence[bytes]) -> tuple[int, Limit]:
        """How many leading blocks fit, and what leaves out the rest."""
        own: Counter[bytes] = self._held_of.get(owner, Counter())
        seen: set[bytes] = set()
        total, of_owner = len(self._held), len(own)
        for count, block_hash in enumerate(hashes):
            if block_hash not in seen:
                total += block_hash not in self._held
                of_owner += block_hash not in own
                seen.add(block_hash)
            if of_owner > self._most_of_owner:
                return count, "tenant"
            if total > self.most:
                return count, "all"
        return len(hashes), ""

    def _put(self, name: str, pin: Pin) -> None:
        self._pins[name] = pin
        self._names_of[pin.owner] += 1
        own = self._held_of.setdefault(pin.owner, Counter())
        own.update(set(pin.hashes))
        self._held.update(set(pin.hashes))
        self._touched.update(pin.hashes)
