"""What the figures of tiers are told of: that each tier gave something back."""

from bench.tiers import TIERS, Answer, is_exact


def answer(text: str, from_tier: int = 0) -> Answer:
    return Answer(1.0, from_tier, [text], [-1.0], from_tier=from_tier)


def test_nothing_is_exact_until_each_tier_gave_something_back() -> None:
    restored = {"computed": answer("a")} | {tier: answer("a", 512) for tier in TIERS}
    assert is_exact([restored], "computed")
    assert not is_exact([], "computed")
    for tier in TIERS:
        computed_again = restored | {tier: answer("b")}
        assert not is_exact([computed_again], "computed")
        assert is_exact([computed_again, restored], "computed")
        assert not is_exact([restored, restored | {tier: answer("b", 512)}], "computed")
