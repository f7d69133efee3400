"""The shapes to which steps are padded."""

import pytest

from engine.step_shapes import StepShape, fitting, step_shapes

SHAPES = step_shapes(256, 8192)


@pytest.mark.parametrize(
    ("lengths", "wanted", "shape"),
    [
        ([1], 1, StepShape(1, 1, 0)),
        ([1] * 33, 33, StepShape(40, 40, 0)),
        ([1] * 256, 256, StepShape(256, 256, 0)),
        ([1] * 3, 2, StepShape(64, 32, 32)),  # one is not asked for its token
        ([1], 0, StepShape(64, 32, 32)),
        ([1, 1, 30], 3, StepShape(64, 32, 32)),
        ([64], 1, StepShape(64, 32, 32)),
        ([1, 64], 2, StepShape(128, 32, 32)),
        ([1] * 33 + [1024], 34, StepShape(1152, 64, 32)),
        ([1024], 0, StepShape(1024, 32, 32)),
        ([2] * 32, 32, StepShape(64, 32, 32)),
        ([2] * 33, 33, None),
        ([2304], 1, StepShape(2304, 32, 32)),
        ([2305], 1, None),
    ],
)
def test_a_step_gets_the_smallest_shape_that_fits(lengths: list[int], wanted: int, shape: StepShape | None) -> None:
    assert fitting(SHAPES, lengths, wanted) == shape


@pytest.mark.parametrize(("running", "tokens"), [(1, 16), (12, 128), (33, 33), (256, 200), (256, 8192)])
def test_every_step_of_few_tokens_has_a_shape(running: int, tokens: int) -> None:
    shapes = step_shapes(running, tokens)
    assert len(set(shapes)) == len(shapes)
    assert max(shape.decodes for shape in shapes) == running
    for decodes in range(running + 1):
        for prompt in range(2, min(tokens, 2304) - decodes + 1):
            assert fitting(shapes, [1] * decodes + [prompt], decodes + 1) is not None
        if decodes:
            assert fitting(shapes, [1] * decodes, decodes) is not None
