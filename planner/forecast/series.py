"""A series of numbers at even times, NaN where nothing was measured, and what a model of one can say."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class Model(Protocol):
    """Some candidates of one kind, which differ in how fast they forget. Each is light: it is told every value."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the candidates."""
        ...

    def add(self, value: float, at: float) -> None:
        """The next value. NaN: a gap. `at`: unix seconds, for what goes by the time of day."""
        ...

    def ahead(self, steps: NDArray[np.int64]) -> Numbers:
        """What is expected so many steps after the last value: `[candidates, len(steps)]`. NaN: nothing known yet."""
        ...
