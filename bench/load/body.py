"""Bodies of requests, of one conversation as it grows."""

import hashlib
from typing import Any

import msgspec

from bench.config import LoadConfig
from bench.workloads.base import Conversation, Literal, Synthetic, Text, Words

_encode = msgspec.json.Encoder().encode


class Dialogue:
    """What has been said so far. In chats it is a list of messages, in completions one text."""

    def __init__(self, config: LoadConfig, words: Words, conversation: Conversation) -> None:
        self._config = config
        self._words = words
        self._conversation = conversation
        self._messages: list[dict[str, str]] = []
        if conversation.system:
            self._messages.append({"role": "system", "content": words.render(conversation.system)})

    def ask(self, turn: int) -> tuple[dict[str, Any], int]:
        """(body of the request, tokens of its prompt as made; 0: not known) for the next turn."""
        config, asked = self._config, self._conversation.turns[turn]
        chat = config.endpoint == "chat"
        first = not self._messages
        text = asked.text
        if first and not chat:
            text = shorten(text, self._words.overhead)
        self._messages.append({"role": "user", "content": self._words.render(text)})
        tokens = 0
        if first and (sized := _tokens(text)):
            added = config.chat_overhead if chat else self._words.overhead
            tokens = sized + added if added >= 0 else 0
        body: dict[str, Any] = {"model": config.model, "stream": True, "stream_options": {"include_usage": True}}
        if chat:
            body["messages"] = list(self._messages)
        else:
            body["prompt"] = "".join(message["content"] for message in self._messages)
        if asked.output_tokens:
            body["max_completion_tokens" if chat else "max_tokens"] = asked.output_tokens
            if config.ignore_eos:
                body["ignore_eos"] = True
        if config.temperature is not None:
            body["temperature"] = config.temperature
        return body | config.extra_body, tokens

    def hear(self, answer: str) -> None:
        """The answer to what was asked last."""
        self._messages.append({"role": "assistant", "content": answer})


def digest(body: dict[str, Any]) -> str:
    """Tells prompts apart: equal for equal messages or prompts, whatever server and sampling."""
    return hashlib.blake2b(_encode(body.get("messages") or body.get("prompt")), digest_size=12).hexdigest()


def shorten(text: Text, tokens: int) -> Text:
    """The text without its last `tokens` tokens, so that a prompt is as long as was asked for with its BOS."""
    parts = list(text)
    while tokens and parts and parts[-1].tokens:
        last = parts.pop()
        if last.tokens > tokens:
            kept = last.tokens - tokens
            parts.append(Synthetic(last.seed, kept) if isinstance(last, Synthetic) else Literal(last.text, kept))
            break
        tokens -= last.tokens
    return parts


def spoil(body: dict[str, Any], number: int) -> bytes:
    """A bad request, of the kinds that servers meet: each must be refused with a status 4xx."""
    asks = "messages" if "messages" in body else "prompt"
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    match number % 6:
        case 0:
            return _encode(body)[:-7]  # cut short
        case 1:
            return _encode(body | {limit: -1})
        case 2:
            return _encode(body | {"model": "no-such-model"})
        case 3:
            return _encode(body | {"temperature": "hot"})
        case 4:
            return _encode(body | {asks: {}})
    return _encode(body | {"stream": "sometimes"})


def _tokens(text: Text) -> int:
    """Tokens of a text whose parts are all sized, else 0."""
    return sum(part.tokens for part in text) if all(part.tokens for part in text) else 0
