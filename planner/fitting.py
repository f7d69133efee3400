"""Coefficients of step times from what was measured, how far they are off, and which a profile may have at all."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.simulator.settings import Settings
from planner.simulator.timing import Timing

HOPS = 2 * Settings.hop  # seconds that a simulation adds to a prompt's `request`: to the worker, and back to the client
LEAST_STEP = 1e-5  # seconds; no step is shorter, so that all can be divided by it

# What the numbers of a profile are within, and what is divided by is above 0.
_SECONDS, _BYTES = (0.0, 1e4), (1.0, 1e15)
_WITHIN: Mapping[str, tuple[float, float]] = {
    "step": (LEAST_STEP, 1e4),
    **{name: _BYTES for name in Timing.__struct_fields__ if name.endswith("_bytes")},
    "gpus": (1, 1024),
    "kv_tokens": (1, 1e12),
}


class PromptTime(msgspec.Struct, frozen=True):
    """Seconds to the first token of a prompt that came alone, or that each took of many that waited for one worker."""

    tokens: int
    seconds: float


class AnswerTime(msgspec.Struct, frozen=True):
    """Seconds a token while `sequences` answers with `context` tokens each were decoded together on one worker."""

    sequences: int
    context: float
    seconds: float


class GatewayTime(msgspec.Struct, frozen=True):
    """Seconds that a gateway's loop was busy with `requests` that came in `wall` seconds, and what they were."""

    requests: int
    prompt_tokens: int  # of all of them
    output_tokens: int
    wall: float
    seconds: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `tandem profile`, or one that says `timing` alone; of a worker of `gpus` cards.

    The ratios are what `timing` makes of each measurement, over what was measured. Raises ValueError, and as it is read
    msgspec.ValidationError, where some number of `timing`, `gpus` or `kv_tokens` is none that there can be.
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
    back_to_back: list[PromptTime] = []  # seconds each of many prompts at once
    back_to_back_ratios: list[float] = []
    gateway: list[GatewayTime] = []

    def __post_init__(self) -> None:
        """The one rule for whoever reads or makes a profile."""
        told = msgspec.structs.asdict(self.timing) | {"gpus": self.gpus, "kv_tokens": self.kv_tokens}
        for name, value in told.items():
            least, most = _WITHIN.get(name, _SECONDS)
            if value is not None and not least <= value <= most:  # neither is what is no number
                raise ValueError(f"{name} {value} is no number that there can be: it must be {least:g} to {most:g}")


def fit_timing(
    prompts: Sequence[PromptTime],
    answers: Sequence[AnswerTime],
    prior: Timing,
    model: str = "",
    *,
    back_to_back: Sequence[PromptTime] = (),
    gateway: Sequence[GatewayTime] = (),
) -> Profile:
    """Least relative squares with no coefficient below 0; what cannot be told from clients stays as in `prior`.

    A step of answers takes a constant, a time a sequence, and one a token kept. A prompt takes a constant, one for each
    token before it, and a time a token or the step's constant, whichever is more: so the shortest prompts tell nothing
    of the time a token. How many these are is what fits best. The hops of the simulator are no part of the constant.
    Prompts `back_to_back` tell what a token takes its worker; what it takes more in a prompt alone is the way there, to
    which belongs what a prompt's token takes a `gateway`.
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
    step, sequence, kept_token = map(float, _fit(steps, step_seconds, LEAST_STEP))
    step += LEAST_STEP
    prior = msgspec.structs.replace(prior, step=step, sequence=sequence, kept_token=kept_token)
    if gateway:
        request, token, prompt_token = _gateway_fit(gateway)
        most = min((prompt.seconds - HOPS) / prompt.tokens for prompt in prompts) / 2
        prior = msgspec.structs.replace(prior, gateway_token=token, request_token=min(prompt_token, most))
    fits = _prompt_fits(prompts, back_to_back, prior)
    timing, ratios = min(fits, key=lambda fit: sum((ratio - 1) ** 2 for ratio in fit[1]))
    if gateway:  # what a request takes it is a part of the request's way
        timing = msgspec.structs.replace(timing, gateway_request=min(request, timing.request))
    return Profile(
        timing,
        model,
        prompts=list(prompts),
        answers=list(answers),
        prompt_ratios=ratios[: len(prompts)],
        answer_ratios=(steps @ np.array([step, sequence, kept_token]) / step_seconds).tolist(),
        back_to_back=list(back_to_back),
        back_to_back_ratios=ratios[len(prompts) :],
        gateway=list(gateway),
    )


def _prompt_fits(
    prompts: Sequence[PromptTime], back_to_back: Sequence[PromptTime], timing: Timing
) -> Iterator[tuple[Timing, list[float]]]:
    """A fit, with its ratios, for each number of the shortest prompts that may take the step's constant."""
    measured = [*prompts, *back_to_back]
    alone = np.arange(len(measured)) < len(prompts)
    tokens = np.array([prompt.tokens for prompt in measured], float)
    taken = np.array([prompt.seconds for prompt in measured])
    for longest in (0.0, *sorted(tokens[alone])[:-2]):
        short = alone & (tokens <= longest)
        floor = np.where(alone, HOPS + timing.request_token * tokens, 0.0) + np.where(short, timing.step, 0.0)
        if (floor >= taken).any():
            continue
        columns = [np.where(alone, 1.0, 0.0), np.where(short, 0.0, tokens), tokens * tokens / 2]
        if back_to_back:  # else nobody knows where a token's time goes
            columns.append(np.where(alone, tokens, 0.0))
        request, token, context, *rest = _fit(np.stack(columns, axis=1), taken, floor).tolist()
        found = msgspec.structs.replace(
            timing,
            request=request,
            prompt_token=token,
            prompt_token_context=context,
            request_token=timing.request_token + sum(rest),
        )
        yield found, [_told(found, each, single) / each.seconds for each, single in zip(measured, alone, strict=True)]


def _told(timing: Timing, prompt: PromptTime, alone: bool) -> float:
    """Seconds. Of several at once steps are full, whatever the length of each."""
    products = prompt.tokens**2 / 2
    if alone:
        return HOPS + timing.arrival(prompt.tokens) + timing.mixed(prompt.tokens, products, 0, 0.0)
    return timing.prompt_token * prompt.tokens + timing.prompt_token_context * products


def _gateway_fit(gateway: Sequence[GatewayTime]) -> tuple[float, float, float]:
    """Seconds of a request, of a token of its answer, and of one of its prompt.

    What it does while nobody asks is counted apart, and so is what it takes to ask it.
    """
    columns = np.array([(one.requests, one.output_tokens, one.prompt_tokens, one.wall, 1) for one in gateway], float)
    seconds = np.array([one.seconds for one in gateway])
    # They are off by as much each, whatever their length.
    request, token, prompt_token, *_ = _fit(columns, seconds, scale=np.full_like(seconds, seconds.max())).tolist()
    return request, token, prompt_token


def _fit(
    columns: NDArray[np.float64],
    target: NDArray[np.float64],
    floor: NDArray[np.float64] | float = 0.0,
    scale: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Coefficients of at least 0 whose sums, with `floor`, are off least: the best of all sets of columns. They are off
    relative to `target`, or to `scale`.
    """
    scale = target if scale is None else scale
    relative, ones = columns / scale[:, None], (target - floor) / scale
    best, least = np.zeros(columns.shape[1]), float("inf")
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            found = np.linalg.lstsq(relative[:, chosen], ones, rcond=None)[0]
            off = float(np.square(relative[:, chosen] @ found - ones).sum())
            if (found >= 0).all() and off < least:
                best, least = np.zeros(columns.shape[1]), off
                best[list(chosen)] = found
    return best
