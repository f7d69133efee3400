"""The shapes to which steps are padded, so that a few graphs serve all of them (`engine.step_graphs`)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_SMALL = (1, 2, 4)
_STEP = 8  # batch sizes beyond: the multiples of this up to 64, then of more
_MOST_TOKENS = 2304  # of a step with prompts; beyond, starting kernels is little beside what they take
_MOST_PROMPTS = 32  # pieces of prompts in one step
_DECODES = (32, 64, 128)  # beside prompts; the fewer, the more parts their keys are cut into, to fill the card


class StepShape(NamedTuple):
    """What a step is padded to."""

    tokens: int
    decodes: int  # tokens that are alone of their sequence
    prompts: int  # pieces of prompts; 0: all tokens are decodes

    @property
    def wanted(self) -> int:
        """Tokens whose logits are computed."""
        return self.decodes + self.prompts


def batch_sizes(largest: int) -> list[int]:
    """Sizes to which batches of up to `largest` decodes are padded, ascending."""
    sizes = [size for size in _SMALL if size < largest]
    size = _STEP
    while size < largest:
        sizes.append(size)
        size += _STEP if size < 64 else 2 * _STEP if size < 256 else 4 * _STEP
    return [*sizes, largest]


def step_shapes(max_running: int, max_batched_tokens: int) -> list[StepShape]:
    """Shapes of steps of up to so many sequences and tokens; of several that fit, the cheaper first."""
    most = min(max_batched_tokens, _MOST_TOKENS)
    counts = [count for count in (*range(64, 256, 64), *range(256, most, 128)) if count < most]
    beside = [size for size in _DECODES if size < max_running]
    return [
        *(StepShape(size, size, 0) for size in batch_sizes(max_running)),
        *(
            StepShape(tokens, decodes, _MOST_PROMPTS)
            for tokens in (*counts, most)
            for smaller, decodes in pairwise((0, *beside, max_running))
            if smaller < tokens
        ),
    ]


def fitting(shapes: Sequence[StepShape], lengths: Sequence[int], wanted: int) -> StepShape | None:
    """The first of the shapes that takes pieces of these lengths, each of one sequence; None: there is none.

    `wanted`: tokens whose logits are needed, at most one of each piece.
    """
    tokens = sum(lengths)
    prompts = sum(length > 1 for length in lengths)
    for shape in shapes:
        enough = shape.tokens >= tokens and shape.decodes >= len(lengths) - prompts and shape.prompts >= prompts
        if enough and (shape.prompts or wanted == tokens):  # without prompts all are computed
            return shape
    return None
