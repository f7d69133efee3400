"""How a choice's deltas look in the two APIs: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from engine.request import TokenLogprob
from engine.text.tokenizer import Tokenizer
from services.gateway.choice import Choice, Delta, Piece
from services.gateway.openai_types import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenEntry,
    TopLogprob,
    Usage,
)
from services.gateway.validation import Options


class Head(msgspec.Struct, frozen=True):
    """What all responses and chunks of one request begin with."""

    request_id: str
    created: int  # Unix time
    model: str


class Format(Protocol):
    """One API's view of choices."""

    chunk_object: str

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        """What a stream tells of a choice before its first delta."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> msgspec.Struct:
        """A delta in a stream."""
        ...

    def body(self, head: Head, choices: list[tuple[Choice, Delta]], usage: Usage) -> msgspec.Struct:
        """The whole response; each delta is all of its choice."""
        ...


class CompletionFormat:
    """The format of /v1/completions."""

    object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        self._options = options

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        """Nothing."""
        return []

    def chunk(self, choice: Choice, delta: Delta) -> CompletionChoice:
        """A delta in a stream."""
        logprobs = None
        if self._options.sampling.logprobs is not None:
            logprobs = self._logprobs(choice, delta.pieces, self._options.sampling.logprobs)
        return CompletionChoice(choice.index, delta.text, logprobs, delta.finish_reason)

    def body(self, head: Head, choices: list[tuple[Choice, Delta]], usage: Usage) -> Completion:
        """The whole response."""
        finished = []
        for choice, delta in choices:
            finished.append(self.chunk(choice, delta))
            finished[-1].prompt_logprobs = _prompt_logprobs(self._tokenizer, self._options, choice)
        return Completion(head.request_id, self.object, head.created, head.model, finished, usage)

    def _logprobs(self, choice: Choice, pieces: list[Piece], count: int) -> CompletionLogprobs:
        logprobs = CompletionLogprobs([], [], [], [])
        for piece in pieces:
            logprobs.text_offset.append(choice.offset)
            choice.offset += len(piece.text)
            logprobs.tokens.append(piece.text)
            if piece.logprob is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.token_logprobs.append(_finite(piece.logprob.logprob))
            top = {_key(self._tokenizer, token_id): _finite(value) for token_id, value in piece.logprob.top[:count]}
            top.setdefault(_key(self._tokenizer, piece.token_id), _finite(piece.logprob.logprob))
            logprobs.top_logprobs.append(top)
        return logprobs


class ChatFormat:
    """The format of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        self._options = options

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        """The role."""
        return [ChatChunkChoice(choice.index, ChatDelta("assistant", ""), None, None)]

    def chunk(self, choice: Choice, delta: Delta) -> ChatChunkChoice:
        """A delta in a stream."""
        content = delta.text if delta.text or delta.finish_reason is None else None
        return ChatChunkChoice(
            choice.index, ChatDelta(None, content), self._logprobs(delta.pieces), delta.finish_reason
        )

    def body(self, head: Head, choices: list[tuple[Choice, Delta]], usage: Usage) -> ChatCompletion:
        """The whole response."""
        finished = []
        for choice, delta in choices:
            message = ChatMessage("assistant", delta.text)
            prompt = _prompt_logprobs(self._tokenizer, self._options, choice)
            logprobs = self._logprobs(delta.pieces)
            finished.append(ChatChoice(choice.index, message, logprobs, delta.finish_reason, prompt))
        return ChatCompletion(head.request_id, self.object, head.created, head.model, finished, usage)

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        count = self._options.sampling.logprobs
        if count is None:
            return None
        entries = []
        for piece in pieces:
            score = piece.logprob or TokenLogprob(piece.token_id, 0.0)
            top = [
                TopLogprob(_text(data), _finite(value), list(data))
                for token_id, value in score.top[:count]
                for data in (self._tokenizer.token_bytes(token_id),)
            ]
            entries.append(TokenEntry(piece.text, _finite(score.logprob), list(piece.data), top))
        return ChatLogprobs(entries)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; tokens that are no whole characters are told apart by their bytes, as OpenAI writes them."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def _prompt_logprobs(tokenizer: Tokenizer, options: Options, choice: Choice) -> PromptLogprobs | Any:
    """What the field prompt_logprobs answers, by token id; UNSET where it was not asked for."""
    if options.prompt_logprobs is None:
        return msgspec.UNSET
    scores: PromptLogprobs = []
    for score in choice.prompt_logprobs or []:
        if score is None:
            scores.append(None)
            continue
        entries = {
            str(token_id): PromptLogprob(_finite(value), rank, _text(tokenizer.token_bytes(token_id)))
            for rank, (token_id, value) in enumerate(score.top[: options.prompt_logprobs], 1)
        }
        own = PromptLogprob(_finite(score.logprob), None, _text(tokenizer.token_bytes(score.token_id)))
        entries.setdefault(str(score.token_id), own)
        scores.append(entries)
    return scores
