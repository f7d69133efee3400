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


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probability of one chosen token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


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


class TokenBatch(msgspec.Struct, array_like=True):
    """One message per engine step and gateway. Without outputs it says how many were sent before."""

    incarnation: str
    sequence: int  # batches with outputs before this one
    outputs: list[TokenOutput]


class BlockStored(msgspec.Struct, array_like=True, tag="stored", frozen=True):
    """Blocks that can now be found by hash, parents first."""

    block_hashes: list[bytes]


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
