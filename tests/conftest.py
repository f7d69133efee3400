"""What fails while the machine stands still is told from what Tandem does wrong."""

from collections.abc import Generator

import pytest
from standstill import Witness, judged

# A wait there that was too brief is told by what failed, as in tests (Makefile).
pytest.register_assert_rewrite("cluster.harness")

_WITNESS = pytest.StashKey[Witness]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_WITNESS] = Witness()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    folder = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    with judged(item.session.stash[_WITNESS], folder):
        yield
