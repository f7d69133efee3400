"""Priors against what was measured with an 8B Llama shape, in bench/results/2026-11-28-h100-h200.md."""

import pytest
from msgspec.structs import replace

from planner.priors import prior
from planner.shapes import SHAPES
from planner.simulator.timing import Timing

LLAMA_8B = SHAPES["llama-8b"]


@pytest.mark.parametrize(
    ("gpu", "sequences", "seconds"),
    [
        ("H200", 1, 4.32e-3),
        ("H200", 24, 5.94e-3),
        ("H200", 32, 6.30e-3),
        ("H200", 256, 15.9e-3),
        ("H100", 1, 5.51e-3),
        ("H100", 32, 8.03e-3),
        ("H100", 128, 13.07e-3),
    ],
)
def test_decode_steps_are_within_an_eighth_of_measured(gpu: str, sequences: int, seconds: float) -> None:
    told = prior(gpu, LLAMA_8B, 8192).timing.decodes(1, sequences, sequences * 1050)
    assert told == pytest.approx(seconds, rel=0.125)


@pytest.mark.parametrize(("tokens", "seconds"), [(1024, 25.5e-3), (4096, 104e-3), (15_000, 488e-3)])
def test_prompts_are_within_a_tenth_of_measured(tokens: int, seconds: float) -> None:
    assert prior("H100", LLAMA_8B, 8192).timing.prompt(0, tokens, 1280) == pytest.approx(seconds, rel=0.1)


def test_an_h200s_cache_and_the_fitted_timing() -> None:
    made = prior("H200", LLAMA_8B, 8192)
    assert made.gpus == 1 and made.kv_tokens == pytest.approx(800_000, rel=0.1)
    assert made.timing.token_bytes == Timing().token_bytes


def test_what_one_card_has_no_room_for_gets_more() -> None:
    big = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)
    made = prior("H100", big, 8192)
    assert made.gpus == 2 and made.kv_tokens > 8192
    assert prior("L40S", big, 8192).gpus == 4
    with pytest.raises(ValueError, match="no room in 8 GPUs"):
        prior("L40S", replace(big, num_layers=400), 8192)


def test_a_degree_that_is_asked_for() -> None:
    two = prior("H100", LLAMA_8B, 8192, 2)
    assert two.gpus == 2 and two.kv_tokens > 2 * prior("H100", LLAMA_8B, 8192, 1).kv_tokens
    with pytest.raises(ValueError, match="cannot be divided among 3 GPUs"):
        prior("H100", LLAMA_8B, 8192, 3)
    with pytest.raises(ValueError, match="no room in 1 GPU of 80 GB"):
        prior("H100", SHAPES["llama-70b"], 8192, 1)
