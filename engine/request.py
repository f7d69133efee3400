"""What the engine is asked for and what it answers: plain structs without torch, also used on the wire."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. The API layer validates ranges; the engine trusts them."""

    max_tokens: int = 16
    min_tokens: int = 0  # stop and eos token ids cannot be sampled before
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    frequency_penalty: float = 0.0  # counts output only
    presence_penalty: float = 0.0  # counts output only
    logit_bias: dict[int, float] = {}
    seed: int = 0  # randomness is keyed by (seed, position in the output)
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # empty with ignore_eos
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best, of the raw log-softmax
    prompt_logprobs: int | None = None


class Request(msgspec.Struct, kw_only=True):
    """One sequence to compute. `output_token_ids` were already given to the client: it resumes behind them."""

    request_id: str
    attempt: int = 0
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    sampling: SamplingParams
    priority: int = 0  # lower runs first, then first come
    deadline: float = float("inf")  # time.monotonic() of this process
    cache_salt: str = ""
    traceparent: str = ""  # W3C trace context
    # Of the leading full blocks, where they are known by their hashes alone; then the tokens are zeros, and nothing may
    # be computed of them.
    block_hashes: list[bytes] = []


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probability of one chosen token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Stage(msgspec.Struct, array_like=True, frozen=True):
    """Something that a request spent time on before its first token."""

    name: str  # queue, prefill or transfer
    start: float  # seconds since the worker that decodes it got it
    seconds: float
    elsewhere: bool = False  # on the worker that computed the prompt for it


class TokenOutput(msgspec.Struct, array_like=True, kw_only=True):
    """What one engine step adds to one request."""

    request_id: str
    attempt: int
    index: int  # place of token_ids[0] in the output; contiguous
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first output only; entry 0 is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the last token of token_ids that ended it (eos or stop id)
    cached_tokens: int = 0  # prompt tokens that were not computed anywhere for this request
    error: str | None = None
    prefill_failed: bool = False  # the prefill worker did not deliver: the prompt was computed where it is decoded
    stages: list[Stage] | None = None  # with the first output of the worker that decodes


class TokenBatch(msgspec.Struct, array_like=True):
    """One message per engine step and gateway. Without outputs it says how many were sent before."""

    incarnation: str
    sequence: int  # batches with outputs before this one
    outputs: list[TokenOutput]


HOST = "host"
TIERS = (HOST, "disk", "redis", "object")  # of the KV service, nearest first


class BlockStored(msgspec.Struct, array_like=True, tag="stored", frozen=True):
    """Blocks that can now be found by hash, parents first.

    Of a worker they follow each other in one prompt, behind `position` blocks, the last of which has the hash `parent`.
    `root`: what that prompt's chain of hashes begins with, one for each tenant. Both are empty where it is not told.
    `tier`: of TIERS, the nearest in which the KV service has them now; it tells that again when they come nearer or go
    further away. Empty: a worker has them.
    """

    block_hashes: list[bytes]
    position: int = 0
    parent: bytes = b""
    root: bytes = b""
    tier: str = ""


class BlockRemoved(msgspec.Struct, array_like=True, tag="removed", frozen=True):
    """Blocks that can no longer be found."""

    block_hashes: list[bytes]


class CacheCleared(msgspec.Struct, array_like=True, tag="cleared", frozen=True):
    """Nothing can be found any more."""


KvEvent = BlockStored | BlockRemoved | CacheCleared


class KvEventBatch(msgspec.Struct, array_like=True):
    """Published by a worker; `sequence` grows by one each, so that a reader sees gaps."""

    incarnation: str
    sequence: int
    events: list[KvEvent]


def unfit(request: Request, max_model_len: int, vocab_size: int) -> str | None:
    """Why a request can never run with a model of so many tokens of context and token ids; None: it can."""
    sampling = request.sampling
    length = len(request.prompt_token_ids) + len(request.output_token_ids)
    if not request.prompt_token_ids:
        return "the prompt is empty: send at least one token"
    if length + bool(sampling.max_tokens) > max_model_len:
        return f"{length} tokens leave no room in the {max_model_len} of model and KV pool: shorten the prompt"
    ids = (*request.prompt_token_ids, *request.output_token_ids, *sampling.logit_bias)
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"token ids must be between 0 and {vocab_size - 1}: found {min(ids)} to {max(ids)}"
    return None
