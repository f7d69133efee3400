"""All tests of this folder."""

from collections.abc import Iterator

import pytest
import structlog
from chaos.pair import short_waits

# Rich would draw each traceback with all variables, which holds up the event loop of both workers for seconds.
PLAIN = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], PLAIN])


@pytest.fixture(autouse=True)
def waits_are_put_back() -> Iterator[None]:
    """What a test sets within `linked` is undone after it, to what holds there; this comes after that."""
    with short_waits():
        yield
