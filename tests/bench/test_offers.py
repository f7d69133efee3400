"""Kinds of workers as the flags of `tandem plan` say them."""

import json
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.replay.offers import offers_of


def test_cards_with_prices_and_degrees() -> None:
    found = offers_of(None, ["H100", "L40S"], "llama-8b", [1, 2], [], ["H100=2.5", "L40S=0.8"])
    assert [(each.gpu, each.gpus, each.cost) for each in found] == [
        ("H100", 1, 2.5), ("H100", 2, 5.0), ("L40S", 1, 0.8), ("L40S", 2, 1.6),
    ]  # fmt: skip
    assert found[1].kv_tokens > 2 * found[0].kv_tokens and found[1].timing.step < found[0].timing.step
    (one,) = offers_of(5_000, ["H100"], "llama-70b", [], [], [])
    assert one.gpus == 2 and one.kv_tokens == 5_000 and one.cost == 2.0
    assert [each.gpus for each in offers_of(None, ["H100"], "llama-70b", [1, 4], [], [])] == [4], "one has no room"


def test_measured_times_of_several_degrees(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps({"timing": {"step": 0.02}, "gpu": "A100", "kv_tokens": 66144}))
    two.write_text(json.dumps({"timing": {"step": 0.013, "prompt_step": 0.01}, "gpu": "A100", "gpus": 2}))
    found = offers_of(None, [], "", [], [one, two], ["1.2"])
    assert [(each.gpus, each.timing.step, each.cost) for each in found] == [(1, 0.02, 1.2), (2, 0.013, 2.4)]
    assert found[0].kv_tokens == 66144
    with pytest.raises(BenchError, match="as many GPUs of one name"):
        offers_of(None, [], "", [], [one, one], [])
    two.write_text(json.dumps({"timing": {}, "gpus": 0}))
    with pytest.raises(BenchError, match="gpus 0 is no number that there can be"):
        offers_of(None, [], "", [], [one, two], [])


@pytest.mark.parametrize(
    ("gpus", "model", "degrees", "prices", "why"),
    [
        (["H100"], "", [], [], "belong together"),
        (["TPU"], "llama-8b", [], [], "is not known, but A100"),
        (["H100"], "llama-9b", [], [], "neither a folder .* nor llama-1b"),
        (["H100"], "llama-8b", [3], [], "cannot be divided among 3"),
        (["H100", "H200"], "llama-8b", [], ["H100=2"], "what does a H200 cost"),
        (["H100"], "llama-8b", [], ["H200=2"], "is of no card"),
        (["H100"], "llama-8b", [], ["H100=free"], "is no price"),
        ([], "", [2], [], "--tensor-parallel goes with --gpu"),
    ],
)
def test_what_cannot_be_is_said(gpus: list[str], model: str, degrees: list[int], prices: list[str], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        offers_of(None, gpus, model, degrees, [], prices)
