"""What one request may cost at most, and the checks that all parameters share. Each raises ApiError 400."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from services.gateway.errors import invalid


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds of one request."""

    choices: int = 128
    prompts: int = 256
    sequences: int = 1024  # prompts x choices
    messages: int = 10_000
    stops: int = 16
    stop_chars: int = 1024
    stop_token_ids: int = 256
    logit_bias: int = 1024
    logprobs: int = 20
    salt_chars: int = 256
    chars_per_token: int = 64  # a prompt with more characters a token of context cannot be meant seriously


LIMITS = Limits()


def check_encodable(param: str, text: str) -> None:
    """JSON can write half a surrogate pair; UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{param} has half of a surrogate pair, which is no Unicode text", param) from None


def check_ids(param: str, ids: list[int], vocab_size: int) -> None:
    """Token ids that the model knows."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(f"{param}: token ids must be from 0 to {vocab_size - 1}", param)


Number = TypeVar("Number", int, float)


def within(
    param: str, value: Number | None, default: Number, low: Number, high: Number, *, above: bool = False
) -> Number:
    """The value, or the default where there is none. `above`: `low` itself is not allowed."""
    value = default if value is None else value
    between(param, value, low, high, above=above)
    return value


def between(param: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """A number in its range. `above`: `low` itself is not allowed."""
    if not low <= value <= high or (above and value == low):
        raise invalid(f"{param} must be {'above' if above else 'at least'} {low} and at most {high}", param)
