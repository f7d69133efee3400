"""When a prefix is fetched, on tables."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from router_tables import ASK, snapshot
from router_tables import worker as row_of

from router.fetch import source_for
from router.snapshot import Ask


def worker(name: str, cached: int = 0, **columns: Any) -> Any:
    return row_of(name, "aggregated", cached=cached, **columns)


def source(computing: Any, *others: Any, ask: Ask = ASK, least: int = 256) -> str | None:
    found = source_for(0, snapshot(computing, *others, ask=ask, fetch_tokens=least))
    return None if found is None else (computing, *others)[found][0]["worker"].decode()


def test_who_has_enough_more_is_the_source() -> None:
    assert source(worker("a"), worker("b", 16)) == "b"
    assert source(worker("a"), worker("b", 15)) is None
    assert source(worker("a", 8), worker("b", 23)) is None
    assert source(worker("a", 8), worker("b", 24)) == "b"
    assert source(worker("a", 40), worker("b", 16)) is None
    assert source(worker("a")) is None
    # The last token is computed in any case, so a prompt that is wholly cached counts one less.
    exactly = replace(ASK, prompt_tokens=256)
    assert source(worker("a"), worker("b", 16), ask=exactly) is None
    assert source(worker("a"), worker("b", 16), ask=exactly, least=255) == "b"


def test_never_where_it_is_switched_off_or_of_no_use() -> None:
    have = worker("b", 60)
    assert source(worker("a"), have, least=0) is None
    assert source(worker("a"), have, ask=replace(ASK, local_prefill_only=True)) is None  # scores of all tokens
    assert source(worker("a"), worker("b", 60, layout=1)) is None
    assert source(worker("a"), worker("b", 60, ready=False)) is None
    assert source(worker("a", fetches=False), have) is None
    assert source(worker("a"), worker("b", 60, sends=False)) is None
    assert source(worker("a"), worker("b", 60, sends=False), worker("c", 50)) == "c"
    assert source(worker("a", sends=False), worker("b", 60, sends=False)) is None


@pytest.mark.parametrize(
    ("prefill_rate", "fetch_rate", "fetches"),
    [
        (np.nan, np.nan, True),
        (1000.0, np.nan, True),
        (np.nan, 10.0, True),
        (1000.0, 1001.0, True),
        (1000.0, 1000.0, False),
        (1000.0, 10.0, False),
        (1000.0, 0.0, False),
        (np.nan, 0.0, True),
    ],
)
def test_what_was_measured_decides(prefill_rate: float, fetch_rate: float, fetches: bool) -> None:
    computing = worker("a", fetch_rate=fetch_rate, prefill_rate=prefill_rate)
    assert (source(computing, worker("b", 60)) == "b") == fetches


def test_the_one_with_most_and_then_the_least_busy() -> None:
    assert source(worker("a"), worker("b", 20), worker("c", 21, prefill=9000)) == "c"
    assert source(worker("a"), worker("b", 20, prefill=10), worker("c", 20)) == "c"
