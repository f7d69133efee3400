"""Bodies of the OpenAI API as structs: what is read from a request and what is written into a response.

Unknown fields of a request are ignored, as other servers do. Features that Tandem knows of but does not offer are
fields here, so that `validation` can refuse them by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

TokenIds = list[int]
Prompt = str | list[str | int | TokenIds]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # Beyond OpenAI, with the names that other servers use
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Known, not offered
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    use_beam_search: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None  # not offered


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message. Only type `text` is offered."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None  # not offered
    function_call: Any = None  # not offered
    audio: Any = None  # not offered


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Known, not offered
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class PromptTokensDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenEntry(msgspec.Struct):
    """One token of a chat choice with its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat choice."""

    content: list[TokenEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completions choice; `text_offset` counts characters from the start of its text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """Log probability of a prompt token, or of an alternative to it. `rank` is known for the most likely ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    """One answer of /v1/completions, or its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """Response of /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(msgspec.Struct):
    """The answer."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """Response of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """The next piece of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ModelEntry(msgspec.Struct):
    """One model of /v1/models."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "tandem"


class ModelList(msgspec.Struct):
    """Response of /v1/models."""

    data: list[ModelEntry]
    object: str = "list"
