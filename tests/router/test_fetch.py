"""When a prefix is fetched, on tables."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from router_tables import ASK, snapshot
from router_tables import worker as row_of

from engine.request import TIERS
from router.cost import features
from router.fetch import source_for
from router.snapshot import Ask
from router.tiers import number


def worker(name: str, cached: int = 0, **columns: Any) -> Any:
    return row_of(name, "aggregated", cached=cached, **columns)


def tier(name: str, cached: int) -> Any:
    """What a KV service has no further away than there."""
    return worker(name, cached, decodes=False, aggregated=False, tier=number(name))


def measured(**rates: float) -> dict[str, Any]:
    """A worker computes 1000 tokens per second, and fetches as many as this from other workers and tiers."""
    return {"prefill_rate": 1000.0, "fetch_rate": [rates.get(name, np.nan) for name in ("workers", *TIERS)]}


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


def test_the_kv_service_has_a_rate_of_its_own() -> None:
    kept = tier("host", 60)
    slow, quick = measured(host=10.0), measured(workers=10.0)
    assert source(worker("a"), worker("b", 60), kept) == "host"  # which computes nothing meanwhile
    assert source(worker("a"), worker("b", 62), tier("host", 50)) == "b"
    assert source(worker("a", **slow), worker("b", 30), kept) == "b"
    assert source(worker("a", **slow), kept) is None
    assert source(worker("a", **quick), worker("b", 61), kept) == "host"
    assert source(worker("a", **quick), worker("b", 61)) is None


def test_each_tier_has_a_rate_of_its_own() -> None:
    kept = [tier("host", 40), tier("disk", 60), tier("redis", 62)]
    assert source(worker("a"), *kept) == "redis"  # nothing was measured: what brings most
    assert source(worker("a", **measured(host=9000.0, disk=8000.0, redis=1500.0)), *kept) == "disk"
    assert source(worker("a", **measured(host=9000.0, disk=1200.0, redis=0.0)), *kept) == "host"
    assert source(worker("a", **measured(host=0.0, disk=1200.0, redis=0.0)), *kept) == "disk"
    assert source(worker("a", **measured(host=0.0, disk=1000.0, redis=0.0)), *kept) is None
    assert source(worker("a", 38, **measured(host=9000.0, disk=1500.0)), *kept[:2]) == "disk"
    assert source(worker("a", **measured(host=9000.0)), tier("host", 60), tier("disk", 60)) == "host"
    assert source(worker("a", **measured(disk=1200.0, workers=5000.0)), worker("b", 60), tier("disk", 60)) == "b"


def test_a_fetch_costs_what_its_tier_takes() -> None:
    kept = [tier("host", 40), tier("disk", 60)]
    near, far = (
        features(ASK, snapshot(worker("a", **measured(**rates)), *kept, fetch_tokens=256)).fetch[0]
        for rates in ({"host": 8000.0, "disk": 10.0}, {"host": 8000.0, "disk": 4000.0})
    )
    assert near == pytest.approx(640 / 8000) and far == pytest.approx(960 / 4000)


def test_the_one_with_most_and_then_the_least_busy() -> None:
    assert source(worker("a"), worker("b", 20), worker("c", 21, prefill=9000)) == "c"
    assert source(worker("a"), worker("b", 20, prefill=10), worker("c", 20)) == "c"
    assert source(worker("a"), worker("b", 20, requests=3), worker("c", 20, requests=2)) == "c"
    # Of a prompt that was computed the booking is still there, and nobody waits for it.
    made = snapshot(worker("a"), worker("b", 20, prefill=9000), worker("c", 20, prefill=500), fetch_tokens=256)
    assert source_for(0, replace(made, queued_tokens=np.array([0.0, 0.0, 500.0]))) == 1
