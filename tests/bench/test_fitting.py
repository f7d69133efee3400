"""Step times from measurements."""

import msgspec
import numpy as np
import pytest

from planner.fitting import HOPS, LEAST_STEP, AnswerTime, GatewayTime, Profile, PromptTime, fit_timing
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


def test_prompts_back_to_back_tell_whose_time_a_token_is() -> None:
    prompts, answers = measured(0.0)
    alone = [PromptTime(one.tokens, one.seconds + 5e-5 * one.tokens) for one in prompts]
    together = [PromptTime(n, n * TRUE.prompt_token + TRUE.prompt_token_context * n * n / 2) for n in LENGTHS[-2:]]
    found = fit_timing(alone, answers, Timing(), back_to_back=together)
    for name, value in msgspec.structs.asdict(msgspec.structs.replace(TRUE, request_token=5e-5)).items():
        assert getattr(found.timing, name) == pytest.approx(value), name
    assert found.back_to_back_ratios == pytest.approx([1.0, 1.0]) and len(found.prompt_ratios) == len(LENGTHS)
    unknown = fit_timing(alone, answers, Timing()).timing
    assert unknown.prompt_token == pytest.approx(TRUE.prompt_token + 5e-5, rel=0.03) and unknown.request_token == 0


def test_what_a_gateway_takes_is_told_from_what_it_takes_without_requests() -> None:
    prompts, answers = measured(0.0)
    gateway = [
        GatewayTime(n, n * length, n * out, wall, 0.004 + 0.01 * wall + 3e-3 * n + 2e-6 * n * length + 7e-5 * n * out)
        for n, length, out, wall in ((6, 64, 1, 4), (6, 900, 1, 9), (20, 900, 1, 8), (2, 64, 200, 3), (48, 64, 90, 7))
    ]
    timing = fit_timing(prompts, answers, Timing(), gateway=gateway).timing
    assert (timing.gateway_request, timing.gateway_token) == pytest.approx((3e-3, 7e-5))
    assert timing.request_token == pytest.approx(2e-6)
    assert timing.prompt_token == pytest.approx(TRUE.prompt_token - 2e-6, rel=0.01)
    slow = [msgspec.structs.replace(one, seconds=one.seconds + one.requests) for one in gateway]
    bound = fit_timing(prompts, answers, Timing(), gateway=slow).timing
    assert bound.gateway_request == bound.request == pytest.approx(TRUE.request, rel=0.01)


def test_no_step_takes_no_time() -> None:
    prompts, answers = measured(0.0)
    steep = [msgspec.structs.replace(one, seconds=1e-3 * one.sequences) for one in answers]
    assert fit_timing(prompts, steep, Timing()).timing.step == pytest.approx(LEAST_STEP)


@pytest.mark.parametrize(
    "odd",
    [
        '{"timing": {"step": 0.0}}',
        '{"timing": {"prompt_token": -1e-6}}',
        '{"timing": {"request": 1e300}}',
        '{"timing": {"token_bytes": 0}}',
        '{"timing": {"redis_bytes": 0}}',
        '{"timing": {}, "gpus": 0}',
        '{"timing": {}, "gpus": 1000000}',
        '{"timing": {}, "kv_tokens": 0}',
    ],
)
def test_a_profile_holds_only_numbers_that_there_can_be(odd: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="there can be"):
        msgspec.json.decode(odd, type=Profile)
    with pytest.raises(ValueError, match="step nan is no number"):
        Profile(Timing(step=float("nan")))


def test_a_profile_of_before_is_read() -> None:
    old = '{"timing": {"step": 0.01, "request": 0.005}, "model": "m", "prompts": [{"tokens": 8, "seconds": 0.1}]}'
    found = msgspec.json.decode(old, type=Profile)
    assert found.timing.arrival(1000) == 0.005 and not found.back_to_back and not found.gateway


def test_prompts_in_chunks_are_summed_up_at_once() -> None:
    timing = Timing(step=0.02, prompt_step=1e-3, prompt_token=4e-5, prompt_token_context=2e-9)
    for start, end in ((0, 5000), (300, 5000), (0, 1), (7, 7), (1280, 2560)):
        chunks = [(at, min(at + 1280, end)) for at in range(start, end, 1280)]
        slow = sum(timing.mixed(to - at, (to - at) * (at + to) / 2, 0, 0.0) for at, to in chunks)
        assert timing.prompt(start, end, 1280) == pytest.approx(slow)
    assert timing.prompt(0, 10**18, 1280) > 1e9
