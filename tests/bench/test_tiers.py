"""What the figures of tiers are told of: that each tier gave something back, and against what it is held."""

import argparse
import contextlib

import pytest
import redis

from bench import tier_limits
from bench.tiers import TIERS, Answer, base, chosen, is_exact, summary
from services.embedded_state import EmbeddedState


def answer(text: str, from_tier: int = 0, ttft: float = 1.0) -> Answer:
    return Answer(ttft, from_tier, [text], [-1.0], from_tier=from_tier, asked=bool(from_tier))


def ways(computed: str = "a") -> dict[str, Answer]:
    """Of a prompt that nobody had, and that its worker had."""
    return {base(tier, "computed"): answer(computed) for tier in TIERS} | {
        base(tier, "cached"): answer(computed, ttft=0.5) for tier in TIERS
    }


def test_nothing_is_exact_until_each_tier_gave_something_back() -> None:
    restored = ways() | {tier: answer("a", 512) for tier in TIERS}
    assert is_exact([restored], TIERS, "computed")
    assert not is_exact([], TIERS, "computed")
    assert not is_exact([restored], (), "computed")
    for tier in TIERS:
        computed_again = restored | {tier: answer("b")}
        assert not is_exact([computed_again], TIERS, "computed")
        assert is_exact([computed_again, restored], TIERS, "computed")
        assert not is_exact([restored, restored | {tier: answer("b", 512)}], TIERS, "computed")
        others = [other for other in TIERS if other != tier]
        assert is_exact([computed_again], others, "computed")


def test_a_peer_is_held_against_what_its_own_cluster_computed() -> None:
    of_peers = {"peer_computed": answer("b", ttft=4.0), "peer_cached": answer("b"), "peer": answer("b", 512, ttft=2.0)}
    rounds = [{512: ways() | {tier: answer("a", 512, ttft=0.75) for tier in TIERS} | of_peers}]
    found = summary(rounds, ("host", "peer"), 2.0, {"in_place": 4096.0})
    assert (found["host_speedup"], found["peer_speedup"]) == (1.0 / 0.75, 2.0)
    row = found["lengths"]["512"]
    assert row["peer_bytes_per_s"] == 1024.0 and row["peer_of_limit"] == 0.25
    assert row["peer_asked"] == row["peer_restored"] == 1.0
    assert row["host_bytes_per_s"] == 4096.0 and "host_of_limit" not in row
    assert is_exact([rounds[0][512]], TIERS, "computed") and is_exact([rounds[0][512]], TIERS, "cached")


def test_what_was_computed_after_all_counts_with_what_it_took() -> None:
    rounds = [{512: ways() | {tier: answer("a", ttft=1.25) for tier in TIERS}}]
    found = summary(rounds, TIERS, 2.0, dict.fromkeys(("redis", "in_place"), 1.0))
    for tier in TIERS:
        assert found[f"{tier}_speedup"] == 0.8
        assert found["lengths"]["512"][f"{tier}_restored"] == found["lengths"]["512"][f"{tier}_asked"] == 0
        assert f"{tier}_of_limit" not in found["lengths"]["512"]


def test_tiers_are_measured_in_one_order() -> None:
    assert chosen("peer,host") == ("host", "peer")
    assert chosen(",".join(TIERS)) == TIERS
    with pytest.raises(argparse.ArgumentTypeError, match="'tape' is none of host, disk"):
        chosen("host,tape")


def test_the_redis_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_limits, "_REDIS_BYTES", 1 << 20)
    with contextlib.closing(EmbeddedState(memory="0")) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": "0"}
        client.set("kept", "of the KV service")
        for value_bytes in (100_000, 2 << 20):  # the latter is more than is read in all
            assert tier_limits.of_redis(server.url, value_bytes)["redis"] > 0
        assert client.keys() == [b"kept"]
