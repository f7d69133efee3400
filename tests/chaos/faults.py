"""Which fault hits what, by a seed, and the books of those that really happened."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

KINDS = ("delay", "cut", "half-open", "corrupt", "truncate", "duplicate", "reorder", "replay", "drop", "swallow")
HEAVY = ("cut", "half-open", "corrupt", "truncate", "swallow")  # a stream that is damaged ends


@dataclass(frozen=True)
class Rates:
    """Chance of each fault for each unit (control frame, KV message, push) that passes a place."""

    chances: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rate: float, heavy: float, heavy_kinds: tuple[str, ...] = HEAVY) -> "Rates":
        """`rate` for faults that hit one unit, `heavy` for those that take a whole link down."""
        return cls({kind: heavy if kind in heavy_kinds else rate for kind in KINDS})

    @classmethod
    def only(cls, kind: str, rate: float = 1.0) -> "Rates":
        """One kind alone."""
        return cls({kind: rate})


def everywhere() -> dict[str, Rates]:
    """All kinds at all places. Steps that take no time otherwise are slowed down at times, so that faults meet them."""
    control, waits = Rates.of(0.04, 0.006), Rates.only("delay", 0.2)
    return {
        "order": control,
        "answer": control,
        "bytes": Rates.of(0.03, 0.004, ("cut", "half-open", "swallow")),
        "push": Rates.of(0.02, 0.02),
        "verify": waits,
        "stop": waits,
    }


def dice(seed: int) -> random.Random:
    """A generator for one run."""
    return random.Random(seed)


@dataclass
class Faults:
    """Draws faults for units, and counts those that were carried out by place, kind and states of the transfer.

    `states(transfer_id)` gives the states of (receiver, sender) in whose presence a fault happens.
    """

    random: random.Random
    rates: dict[str, Rates]  # by place: "order" (decode to prefill), "answer", "bytes", "push", "verify", "stop"
    states: Callable[[str], tuple[str, str]] = lambda transfer_id: ("-", "-")
    happened: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)  # units that went through, by place
    quiet: bool = False  # no more faults

    def draw(self, place: str) -> str | None:
        """The fault for the next unit at this place."""
        self.passed[place] += 1
        rates = self.rates.get(place)
        if rates is None or self.quiet:
            return None
        dice = self.random.random()
        for kind, chance in rates.chances.items():
            dice -= chance
            if dice < 0:
                return kind
        return None

    def count(self, place: str, kind: str, transfer_id: str) -> None:
        """A fault has been carried out."""
        self.happened[(place, kind, *self.states(transfer_id))] += 1

    @property
    def total(self) -> int:
        """Faults so far."""
        return self.happened.total()

    def by(self, *columns: int) -> Counter[tuple[str, ...]]:
        """Faults by some of (place 0, kind 1, receiver's state 2, sender's state 3)."""
        grouped: Counter[tuple[str, ...]] = Counter()
        for key, count in self.happened.items():
            grouped[tuple(key[column] for column in columns)] += count
        return grouped

    def damage(self, data: bytes, kind: str) -> bytes:
        """`data` with one bit flipped, or without its tail."""
        if kind == "truncate":
            return data[: self.random.randrange(len(data))]
        damaged = bytearray(data)
        damaged[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(damaged)
