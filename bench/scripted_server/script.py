"""What the server is told to do, and what it tells of what it did."""

from typing import Annotated, Literal

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong: `http` and `close` (without an answer) in place of the whole answer, others at one message.

    `reset` drops the connection, `stall` sends nothing more, `malformed` sends an event that is no JSON, `error_event`
    sends an error and ends, `cut` ends without finish_reason and [DONE]. `no_done` leaves out [DONE] alone.
    """

    kind: Literal["http", "close", "reset", "stall", "malformed", "error_event", "cut", "no_done"]
    at: int = 0  # messages with text that come before it; in a shorter answer nothing happens
    status: int = 500
    headers: dict[str, str] = {}


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one streamed request is answered. Times are in seconds."""

    ttft: float = 0.05
    gaps: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)] = (0.02,)  # between messages; over and over
    tokens: int | Literal["asked"] = "asked"  # "asked": as many as the request wants; 0: an empty answer
    tokens_per_message: int = 1
    usage: bool = True  # tells token counts to those who ask for them
    cached_tokens: int | None = None
    fault: Fault | None = None
    split: bool = False  # every byte is a write of its own
    crlf: bool = False  # lines of events end with CR LF
    comments: bool = False  # a comment before each event


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the server does."""

    answers: Annotated[list[ScriptedAnswer], msgspec.Meta(min_length=1)]
    model: str = "scripted"


class Sent(msgspec.Struct, kw_only=True):
    """A line of the log: one streamed request. Times are time.monotonic(), taken just before each write; -1: never."""

    number: int  # order of arrival
    path: str
    received: float  # all of the request was there
    prompt_tokens: int  # words of the prompt, or its token ids
    times: list[float] = []  # of messages with text
    tokens: int = 0  # in these messages
    end: float = -1.0  # of the last message
    fault: str = ""
    left: bool = False  # the client hung up before the end
