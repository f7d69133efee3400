"""What will come: fed windows, a forecaster tells how many requests the next minutes bring, and what they are like."""

from typing import Protocol

import msgspec

from planner.window import NAN, Window


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is expected, and what it stays under with the probability that the forecaster was asked for.

    `spread`: values that are equally likely, without the noise that counts of chance arrivals have; (): `upper` alone.
    """

    mean: float = NAN
    upper: float = NAN
    spread: tuple[float, ...] = ()


class Forecast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one moment. NaN: nothing is known yet."""

    at: float = NAN  # unix seconds: the moment that it is for
    arrivals: Band = Band()  # requests a second
    prompt_tokens: Band = Band()  # of a request, in the mean
    output_tokens: Band = Band()  # of a request, in the mean
    cached_share: Band = Band()  # of the prompt tokens; here `upper` is the low end: what it stays above
    method: str = ""  # which forecast of arrivals was picked


class Forecaster(Protocol):
    """Keeps the history that it needs. Windows come in the order of their times; some may be missing."""

    def add(self, window: Window) -> None:
        """One window more. What is NaN in it is a gap, and means of a window without requests say nothing."""
        ...

    def ahead(self, seconds: float) -> Forecast:
        """For so long after the last window."""
        ...
