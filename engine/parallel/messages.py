"""What rank 0 tells the others: each message is one call that they make as rank 0 makes it.

Tensors follow by broadcast. On the pipe a message is its size, 4 bytes little-endian, and msgpack. Block lists are sent
once, and then only what is new in them.
"""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import numpy as np

from engine.attention.base import Span
from engine.attention.table_rows import Addition, TableRows

_LONGEST = 64 << 20  # bytes


class Start(msgspec.Struct, tag=True):
    """The first one: who the rank is, and what it loads."""

    rank: int
    size: int
    meeting: str  # file by which the ranks find each other
    folder: str  # of the model
    config: bytes  # EngineConfig


class Build(msgspec.Struct, tag=True):
    """Makes an engine of the loaded model, instead of an earlier one."""

    config: bytes  # EngineConfig


class Room(msgspec.Struct, tag=True):
    """The ranks agree on how much memory is left for the KV cache."""


class Meet(msgspec.Struct, tag=True):
    """`meet` of the group: what was asked for before is done everywhere."""


class Sleep(msgspec.Struct, tag=True):
    """`release_memory` of the engine."""


class Wake(msgspec.Struct, tag=True):
    """`take_memory` of the engine."""


class Spans(msgspec.Struct, array_like=True):
    """Spans of tokens, and what is new in the block lists that they refer to by row."""

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    additions: list[Addition]


class Plan(msgspec.Struct, tag=True):
    """`plan` of the attention backend."""

    spans: Spans


class Forward(msgspec.Struct, tag=True):
    """`forward` of the model over what was planned; token ids follow, then as many wanted rows."""

    num_rows: int | None


class Logits(msgspec.Struct, tag=True):
    """`logits` of the model; so many hidden states follow."""

    count: int


class Replay(msgspec.Struct, tag=True):
    """`run` of the graphs."""

    spans: Spans
    token_ids: list[int]
    wanted: list[int]


class Keep(msgspec.Struct, tag=True):
    """`keep` of the graphs; so many table rows and tokens follow."""

    count: int


Message = Start | Build | Room | Meet | Sleep | Wake | Plan | Forward | Logits | Replay | Keep


class SpanWriter:
    """Turns spans into messages; `rows` as in `TableRows`."""

    def __init__(self, rows: int) -> None:
        self._rows = TableRows(rows)

    def write(self, spans: Sequence[Span]) -> Spans:
        """Rows and additions are to reach every reader in this order."""
        rows, additions = self._rows.rows_of([span.block_ids for span in spans])
        return Spans(rows, [span.start for span in spans], [span.length for span in spans], additions)


class SpanReader:
    """Turns messages into spans. A list stays the same object as long as it does on rank 0: backends rely on that."""

    def __init__(self) -> None:
        self._lists: dict[int, list[int]] = {}

    def read(self, message: Spans) -> list[Span]:
        """The spans."""
        for row, start, blocks in message.additions:
            if start == 0:
                self._lists[row] = []
            self._lists[row] += blocks
        lists = (self._lists[row] for row in message.rows)
        return [Span(*span) for span in zip(lists, message.starts, message.lengths, strict=True)]


def positions_of(spans: Sequence[Span]) -> np.ndarray:
    """Positions int64 [N] of the spans' tokens."""
    return np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])


def framed(message: Message) -> bytes:
    """What goes onto the pipe."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _LONGEST:
        raise ValueError(f"a message of {len(body)} bytes is longer than {_LONGEST}")
    return len(body).to_bytes(4, "little") + body


def messages(pipe: BinaryIO) -> Iterator[Message]:
    """What comes off the pipe, until it is closed."""
    decoder = msgspec.msgpack.Decoder(Message)
    while len(head := pipe.read(4)) == 4:
        size = int.from_bytes(head, "little")
        if size > _LONGEST or len(body := pipe.read(size)) < size:
            return
        message: Message = decoder.decode(body)
        yield message
