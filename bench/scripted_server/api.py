"""The part of OpenAI's API that the server speaks: requests as structs, answers as bytes."""

import json
import time
from typing import Annotated, Any

import msgspec

_DEFAULT_TOKENS = 16  # of a request that asks for no number


class Part(msgspec.Struct):
    """Part of a message's content."""

    text: str = ""


class Message(msgspec.Struct):
    """One message of a chat."""

    content: str | list[Part] | None = None


class StreamOptions(msgspec.Struct):
    """Part of Ask."""

    include_usage: bool = False


class Ask(msgspec.Struct):
    """Body of a request."""

    model: str
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: float | None = None

    @property
    def wanted(self) -> int:
        """Tokens that it asks for."""
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return _DEFAULT_TOKENS if wanted is None else wanted

    @property
    def prompt_tokens(self) -> int:
        """Words of the prompt, or its token ids."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        texts = [self.prompt or ""]
        for message in self.messages or ():
            content = message.content or ""
            texts += [content] if isinstance(content, str) else [part.text for part in content]
        return sum(len(text.split()) for text in texts)


decode_ask = msgspec.json.Decoder(Ask).decode

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def response(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A whole answer with a JSON body."""
    lines = [f"HTTP/1.1 {status} -", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def error_body(message: str, status: int) -> str:
    """The body of errors and error events."""
    return json.dumps({"error": {"message": message, "type": "scripted", "param": None, "code": status}})


def error(status: int, message: str, headers: dict[str, str] | None = None) -> bytes:
    """A whole answer that refuses."""
    return response(status, error_body(message, status).encode(), headers)


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """Token counts; `cached` None: not told."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return counts | details


def whole(ask: Ask) -> bytes:
    """An answer that is not streamed."""
    text = "".join(f" {token}" for token in range(ask.wanted))
    chat = ask.messages is not None
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text, "logprobs": None}
    answer = {
        "id": "chatcmpl" if chat else "cmpl",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [{"index": 0, **said, "finish_reason": "length"}],
        "usage": usage(ask.prompt_tokens, ask.wanted, None),
    }
    return response(200, msgspec.json.encode(answer))
