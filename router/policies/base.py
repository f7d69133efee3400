"""What every policy is: a pure function of the request and the workers that could take it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.cost import NOWHERE, Elsewhere, Objectives
from router.snapshot import Ask, Snapshot


class Overlap(NamedTuple):
    """Settings of the policy of this name."""

    weight: float = 1.0
    temperature: float = 0.0


class Draw(NamedTuple):
    """What else may decide: chance, and settings."""

    rng: np.random.Generator
    overlap: Overlap = Overlap()
    tolerance: float = 0.0  # of the policy prefix: a cost that is so much higher, of the least, is as good
    objectives: Objectives = Objectives()
    elsewhere: Elsewhere = NOWHERE  # where a decode worker would get the prompt's KV


# Cost `[n]` of giving the request to each of the workers; the least wins, and of equals any.
Policy = Callable[[Ask, Snapshot, Draw], NDArray[np.float64]]
