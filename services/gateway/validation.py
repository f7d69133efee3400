"""What a request may ask: every bad value is a 400 that names the parameter, found before anything is tokenised.

The limits bound what one request can cost. Ranges follow OpenAI where it has the parameter and other servers
otherwise. Numbers are exact types: 1.5 or "3" is no integer, true is no number; JSON has no NaN.
"""

from __future__ import annotations

import re
import secrets
from typing import TypeVar

import msgspec

from engine.request import SamplingParams
from services.gateway.errors import invalid, not_offered
from services.gateway.limits import LIMITS, between, check_encodable, check_ids, within
from services.gateway.openai_types import ChatRequest, CompletionRequest, SamplingFields

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
T = TypeVar("T", CompletionRequest, ChatRequest)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid request asks for, apart from its prompts. `sampling.seed` is the first choice's."""

    sampling: SamplingParams
    max_tokens: int | None  # None: as many as fit
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    prompt_logprobs: int | None = None  # asked for as a field of the response
    priority: int = 0
    cache_salt: str = ""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The request in a body. Raises ApiError 400."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        # The first step of the path is the parameter; a field that is missing is named in the message alone.
        param = re.split(r"[.\[]", path.group(1))[0] if path and path.group(1) else None
        if param is None and (missing := re.search(r"missing required field `(\w+)`", message)):
            param = missing.group(1)
        raise invalid(message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON in UTF-8: {error}", None, "invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply", None, "invalid_json") from None


def completion_options(request: CompletionRequest, vocab_size: int) -> Options:
    """Checks everything of a completions request but its prompts."""
    if request.suffix:
        raise not_offered("suffix", "Insertion before a suffix")
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    between("max_tokens", max_tokens, 0, _INT32)
    if request.logprobs is not None:
        between("logprobs", request.logprobs, 0, LIMITS.logprobs)
    return _options(request, max_tokens, request.logprobs, bool(request.echo), vocab_size)


def chat_options(request: ChatRequest, vocab_size: int) -> Options:
    """Checks everything of a chat request but its messages."""
    for param, what in (
        ("tools", "Tool calling"),
        ("functions", "Function calling"),
        ("audio", "Audio"),
        ("prediction", "Predicted output"),
        ("web_search_options", "Web search"),
    ):
        if getattr(request, param):
            raise not_offered(param, what)
    for param in ("tool_choice", "function_call"):
        if getattr(request, param) not in (None, "none", "auto"):
            raise not_offered(param, "Tool calling")
    if request.modalities not in (None, [], ["text"]):
        raise not_offered("modalities", "Output other than text")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(request, param)
    if max_tokens is not None:
        between(param, max_tokens, 1, _INT32)
    logprobs = None
    if request.top_logprobs is not None:
        between("top_logprobs", request.top_logprobs, 0, LIMITS.logprobs)
        if not request.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    return _options(request, max_tokens, logprobs, False, vocab_size)


def _options(
    request: SamplingFields, max_tokens: int | None, logprobs: int | None, echo: bool, vocab_size: int
) -> Options:
    """What completions and chat have in common."""
    n = within("n", request.n, 1, 1, LIMITS.choices)
    if request.best_of not in (None, n):
        raise invalid("best_of must be equal to n, or left out", "best_of", "unsupported")
    if request.use_beam_search:
        raise not_offered("use_beam_search", "Beam search")
    if request.response_format and request.response_format.get("type") != "text":
        raise not_offered("response_format", "A response format other than text")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed with stream=true", "stream_options")
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is not None:
        between("prompt_logprobs", prompt_logprobs, 0, LIMITS.logprobs)
        if request.stream:
            raise invalid("prompt_logprobs is only allowed with stream=false", "prompt_logprobs")
    min_tokens = within("min_tokens", request.min_tokens, 0, 0, _INT32)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens is {min_tokens}, more than max_tokens, {max_tokens}", "min_tokens")
    seed = secrets.randbits(63) if request.seed is None else request.seed
    between("seed", seed, -_INT64 - 1, _INT64)
    top_k = within("top_k", request.top_k, 0, -1, _INT32)
    if request.cache_salt is not None:
        if not 0 < len(request.cache_salt) <= LIMITS.salt_chars:
            raise invalid(f"cache_salt must have 1 to {LIMITS.salt_chars} characters", "cache_salt")
        check_encodable("cache_salt", request.cache_salt)
    of_prompt = [count for count in (prompt_logprobs, logprobs if echo else None) if count is not None]
    sampling = SamplingParams(
        max_tokens=0,  # known when the prompt is
        min_tokens=min_tokens,
        temperature=within("temperature", request.temperature, 1.0, 0.0, 100.0),
        top_k=max(top_k, 0),
        top_p=within("top_p", request.top_p, 1.0, 0.0, 1.0, above=True),
        min_p=within("min_p", request.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=within("repetition_penalty", request.repetition_penalty, 1.0, 0.0, 100.0, above=True),
        frequency_penalty=within("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        presence_penalty=within("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(request, vocab_size),
        seed=seed % 2**64,
        stop_token_ids=_stop_token_ids(request, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=max(of_prompt) if of_prompt else None,
    )
    stream_options = request.stream_options
    return Options(
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        stream=bool(request.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(
            stream_options and stream_options.include_usage and stream_options.continuous_usage_stats
        ),
        stop=_stops(request),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        priority=within("priority", request.priority, 0, -_INT32, _INT32),
        cache_salt=request.cache_salt or "",
    )


def _stops(request: SamplingFields) -> tuple[str, ...]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > LIMITS.stops:
        raise invalid(f"stop has {len(stops)} entries; at most {LIMITS.stops} are allowed", "stop")
    for stop in stops:
        if not 0 < len(stop) <= LIMITS.stop_chars:
            raise invalid(f"each stop string must have 1 to {LIMITS.stop_chars} characters", "stop")
        check_encodable("stop", stop)
    return tuple(stops)


def _stop_token_ids(request: SamplingFields, vocab_size: int) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    if len(ids) > LIMITS.stop_token_ids:
        raise invalid(f"stop_token_ids has more than {LIMITS.stop_token_ids} entries", "stop_token_ids")
    check_ids("stop_token_ids", ids, vocab_size)
    return tuple(ids)


def _logit_bias(request: SamplingFields, vocab_size: int) -> dict[int, float]:
    given = request.logit_bias or {}
    if len(given) > LIMITS.logit_bias:
        raise invalid(f"logit_bias has more than {LIMITS.logit_bias} entries", "logit_bias")
    biases = {}
    for key, value in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            raise invalid(f"logit_bias: keys are token ids from 0 to {vocab_size - 1}, not {key[:20]!r}", "logit_bias")
        biases[int(key)] = within("logit_bias", value, 0.0, -100.0, 100.0)
    return biases
