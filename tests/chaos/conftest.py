"""All tests of this folder."""

from collections.abc import Iterator

import pytest
from chaos.pair import short_waits


@pytest.fixture(autouse=True)
def waits_are_put_back() -> Iterator[None]:
    """What a test sets within `linked` is undone after it, to what holds there; this comes after that."""
    with short_waits():
        yield
