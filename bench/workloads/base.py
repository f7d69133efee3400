"""Conversations: what a workload yields. Texts stay recipes until they are sent, so that a trace fits in memory."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from bench.config import WorkloadConfig


class Synthetic(msgspec.Struct, frozen=True):
    """`tokens` words that `seed` chooses, each one token. Equal seeds begin with equal text, whatever their length."""

    seed: tuple[int, ...]
    tokens: int


class Literal(msgspec.Struct, frozen=True):
    """Text from a file, made to be exactly `tokens` long; 0: as long as it is."""

    text: str
    tokens: int = 0


Text = Sequence[Synthetic | Literal]


class Turn(msgspec.Struct, kw_only=True):
    """One request of a conversation."""

    text: Text
    output_tokens: int = 0  # 0: as many as the model likes
    think: float = 0.0  # seconds to wait before it, after the answer before
    shared_tokens: int = -1  # leading tokens that an endless cache would hold; -1: not known


class Conversation(msgspec.Struct, kw_only=True):
    """Turns that follow each other. Of several, each sends the history: questions and the server's answers."""

    turns: list[Turn]
    at: float | None = None  # traces: seconds since the start of the replay
    system: Text = ()


class Words(Protocol):
    """Makes text of recipes for one tokenizer (`bench.workloads.words`)."""

    overhead: int  # tokens that open every prompt (BOS) and count with it

    def render(self, text: Text) -> str:
        """The text; each Synthetic part and each Literal with a length is exactly that many tokens."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a text, without those that open every prompt."""
        ...


class Workload(Protocol):
    """Yields conversations, the same ones for the same seed; endless unless its data end.

    Raises `bench.errors.BenchError` for data that cannot be read, with file, line and reason.
    """

    def __call__(self, config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
        """Conversations of `config`, drawn with `seed`."""
        ...
