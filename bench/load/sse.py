"""Server-sent events (HTML standard, section 9.2) and the chunks of OpenAI's API inside them."""

import msgspec

_NULL = msgspec.Raw(b"null")


class EventParser:
    """Gives the data of each event, however the bytes were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that are complete now. Comments and other fields are skipped."""
        events: list[bytes] = []
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class PromptDetails(msgspec.Struct):
    """Part of Usage."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of the server."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    """What a chunk adds to a chat answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NULL


class Choice(msgspec.Struct):
    """One choice of a chunk: `delta` in chats, `text` in completions."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        """The text that it adds."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def carries_output(self) -> bool:
        """Whether it brings text or a part of a tool call."""
        if self.piece:
            return True
        return self.delta is not None and bytes(self.delta.tool_calls) not in (b"null", b"[]")


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = _NULL


decode_chunk = msgspec.json.Decoder(Chunk).decode
