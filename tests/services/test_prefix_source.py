"""Where a prompt's prefix may be fetched, as a router says it."""

import pytest

from engine.request import TIERS
from services.rpc import router_pb2
from services.worker.wire import source_from_wire, source_to_wire


@pytest.mark.parametrize("tier", ["", *TIERS, "tape"])
def test_a_tier_that_is_not_known_counts_as_the_furthest(tier: str) -> None:
    worker = router_pb2.Endpoint(name="kv", incarnation="i", address="127.0.0.1:1")
    source = source_from_wire(router_pb2.PrefixSource(worker=worker, tokens=64, tier=tier))
    assert source.tier == (TIERS[-1] if tier == "tape" else tier)
    assert source_from_wire(source_to_wire(source)) == source
