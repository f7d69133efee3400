"""Which clients are unruly, and how many of them."""

import re

import msgspec
import numpy as np

from bench.errors import BenchError

UNRULY = ("slow", "disconnect", "cancel", "bad")


class Mix(msgspec.Struct, frozen=True):
    """Shares of unruly clients, each from 0 to 1; the others are normal."""

    shares: dict[str, float] = {}

    def client(self, rng: np.random.Generator) -> str:
        """Kind of the next client: normal, slow, disconnect, cancel or bad."""
        at = float(rng.random())
        for kind, share in self.shares.items():
            at -= share
            if at < 0:
                return kind
        return "normal"


def parse_mix(text: str) -> Mix:
    """Reads "slow=5%,disconnect=0.1"; empty: all are normal. Raises BenchError."""
    shares: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(%?)", part)
        if match is None or match[1] not in UNRULY:
            raise BenchError(f"--mix {part!r}: write e.g. slow=5%,disconnect=10%; there are {', '.join(UNRULY)}")
        if match[1] in shares:
            raise BenchError(f"--mix names {match[1]} twice")
        shares[match[1]] = float(match[2]) / (100 if match[3] else 1)
    if sum(shares.values()) > 1 + 1e-9:  # decimal shares do not add up exactly
        raise BenchError(f"--mix {text!r} is more than 100 %")
    return Mix(shares)
