"""Coefficients of step times from what was measured, and how far they are off."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.simulator.settings import Settings
from planner.simulator.timing import Timing

HOPS = 2 * Settings.hop  # seconds that a simulation adds to a prompt's `request`: to the worker, and back to the client


class PromptTime(msgspec.Struct, frozen=True):
    """Seconds to the first token of a prompt that came alone."""

    tokens: int
    seconds: float


class AnswerTime(msgspec.Struct, frozen=True):
    """Seconds a token while `sequences` answers with `context` tokens each were decoded together on one worker."""

    sequences: int
    context: float
    seconds: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `tandem profile`, or one that says `timing` alone; of a worker of `gpus` cards.

    The ratios are what `timing` makes of each measurement, over what was measured.
    """

    timing: Timing
    model: str = ""
    gpu: str = ""  # name of the card
    gpus: int = 1  # tensor-parallel degree
    kv_tokens: int | None = None  # that the worker's cache holds; None: it is not known
    prompts: list[PromptTime] = []
    answers: list[AnswerTime] = []
    prompt_ratios: list[float] = []
    answer_ratios: list[float] = []


def fit_timing(prompts: Sequence[PromptTime], answers: Sequence[AnswerTime], prior: Timing, model: str = "") -> Profile:
    """Least relative squares with no coefficient below 0; what cannot be told from clients stays as in `prior`.

    A step of answers takes a constant, a time a sequence, and one a token kept. A prompt takes a constant, one for each
    token before it, and a time a token or the step's constant, whichever is more: so the shortest prompts tell nothing
    of the time a token. How many these are is what fits best. The hops of the simulator are no part of the constant.
    Raises ValueError below three measurements of either, or where a first token came sooner than these hops.
    """
    if len(prompts) < 3 or len(answers) < 3:
        raise ValueError(
            f"{len(prompts)} prompts and {len(answers)} batches are too few to fit: at least three of each"
        )
    if (soonest := min(prompt.seconds for prompt in prompts)) <= HOPS:
        raise ValueError(f"a first token after {1e3 * soonest:.2f} ms is sooner than the hops of a simulation")
    sequences = np.array([answer.sequences for answer in answers], float)
    kept = sequences * np.array([answer.context for answer in answers])
    steps = np.stack([np.ones_like(sequences), sequences, kept], axis=1)
    step_seconds = np.array([answer.seconds for answer in answers])
    by_answer = _fit(steps, step_seconds)
    step, sequence, kept_token = map(float, by_answer)
    prior = msgspec.structs.replace(prior, step=step, sequence=sequence, kept_token=kept_token)
    timing, ratios = min(_prompt_fits(prompts, prior), key=lambda fit: sum((ratio - 1) ** 2 for ratio in fit[1]))
    return Profile(
        timing,
        model,
        prompts=list(prompts),
        answers=list(answers),
        prompt_ratios=ratios,
        answer_ratios=(steps @ by_answer / step_seconds).tolist(),
    )


def _prompt_fits(prompts: Sequence[PromptTime], timing: Timing) -> Iterator[tuple[Timing, list[float]]]:
    """A fit, with its ratios, for each number of the shortest prompts that may take the step's constant."""
    tokens = np.array([prompt.tokens for prompt in prompts], float)
    taken = np.array([prompt.seconds for prompt in prompts])
    for longest in (0.0, *sorted(tokens)[:-2]):
        short = tokens <= longest
        floor = np.where(short, timing.step, 0.0) + HOPS
        if (floor >= taken).any():
            continue
        columns = np.stack([np.ones_like(tokens), np.where(short, 0.0, tokens), tokens * tokens / 2], axis=1)
        request, token, context = map(float, _fit(columns, taken, floor))
        found = msgspec.structs.replace(timing, request=request, prompt_token=token, prompt_token_context=context)
        told = [HOPS + request + found.mixed(each.tokens, each.tokens**2 / 2, 0, 0.0) for each in prompts]
        yield found, [mine / each.seconds for mine, each in zip(told, prompts, strict=True)]


def _fit(
    columns: NDArray[np.float64], target: NDArray[np.float64], floor: NDArray[np.float64] | float = 0.0
) -> NDArray[np.float64]:
    """Coefficients of at least 0 whose sums, with `floor`, are off least, relative to `target`: the best of all sets of
    columns.
    """
    relative, ones = columns / target[:, None], (target - floor) / target
    best, least = np.zeros(columns.shape[1]), float("inf")
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            found = np.linalg.lstsq(relative[:, chosen], ones, rcond=None)[0]
            off = float(np.square(relative[:, chosen] @ found - ones).sum())
            if (found >= 0).all() and off < least:
                best, least = np.zeros(columns.shape[1]), off
                best[list(chosen)] = found
    return best
