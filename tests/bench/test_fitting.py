"""Step times from measurements."""

import msgspec
import numpy as np
import pytest

from planner.fitting import HOPS, AnswerTime, PromptTime, fit_timing
from planner.simulator.timing import Timing

TRUE = Timing(
    step=0.02, prompt_token=4e-4, prompt_token_context=2e-8, sequence=3e-3, kept_token=2e-7, request=0.015
)  # some CPU
LENGTHS = (32, 64, 256, 512, 1024, 1800)  # the first takes as long as a step without prompts
BATCHES = [(sequences, context) for context in (90, 1050) for sequences in (1, 2, 4, 8)]


def measured(noise: float) -> tuple[list[PromptTime], list[AnswerTime]]:
    rng = np.random.default_rng(3)
    prompts = [
        PromptTime(n, (HOPS + TRUE.request + TRUE.prompt(0, n, 1 << 20)) * (1 + noise * float(rng.normal())))
        for n in LENGTHS
    ]
    answers = [
        AnswerTime(n, context, TRUE.decodes(1, n, n * context) * (1 + noise * float(rng.normal())))
        for n, context in BATCHES
    ]
    return prompts, answers


def test_what_was_measured_exactly_is_found() -> None:
    found = fit_timing(*measured(0.0), Timing(link_bytes=5e9))
    for name, value in msgspec.structs.asdict(TRUE).items():
        if name != "link_bytes":
            assert getattr(found.timing, name) == pytest.approx(value), name
    assert found.timing.link_bytes == 5e9, "clients do not see it"
    assert [*found.prompt_ratios, *found.answer_ratios] == pytest.approx([1.0] * 14)


def test_noise_makes_no_coefficient_negative() -> None:
    found = fit_timing(*measured(0.15), Timing())
    assert min(msgspec.structs.astuple(found.timing)) >= 0
    assert np.abs(np.array(found.prompt_ratios + found.answer_ratios) - 1).max() < 0.5


def test_too_little_is_said() -> None:
    prompts, answers = measured(0.0)
    with pytest.raises(ValueError, match="2 prompts and 8 batches are too few"):
        fit_timing(prompts[:2], answers, Timing())
    with pytest.raises(ValueError, match="sooner than the hops"):
        fit_timing([*prompts, PromptTime(8, 0.001)], answers, Timing())
