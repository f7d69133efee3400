"""The process of a rank other than 0: builds its share of the engine, then makes the calls that rank 0 makes.

`python -m engine.parallel.follow LIFELINE`: messages come on stdin; at the end of the file descriptor LIFELINE, rank 0
is gone.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import assert_never

import msgspec
import torch

from engine.attention.base import AttentionContext, Span
from engine.config import ModelError
from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCacheError
from engine.parallel.group import TensorParallelGroup
from engine.parallel.messages import (
    Decode,
    Forward,
    Keep,
    Logits,
    Message,
    Plan,
    SpanReader,
    Start,
    messages,
    positions_of,
)

_PATIENCE = 30.0  # seconds


class Follower:
    """Makes calls on one rank's share of an engine."""

    def __init__(self, engine: Engine, group: TensorParallelGroup) -> None:
        self._model, self._attention, self._graphs = engine.computation
        self._group = group
        self._device = engine.kv_cache.tensor.device
        self._lists = SpanReader()
        self._spans: list[Span] = []
        self._context: AttentionContext | None = None

    def follow(self, message: Message) -> None:
        """Makes the call of one message."""
        match message:
            case Plan(spans):
                self._spans = self._lists.read(spans)
                self._context = self._attention.plan(self._spans)
            case Forward(num_rows):
                positions = torch.from_numpy(positions_of(self._spans)).to(self._device)
                given = self._receive(len(positions) + (num_rows or 0))
                token_ids, rows = given[: len(positions)], given[len(positions) :]
                assert self._context is not None
                hidden = self._model.forward(token_ids, positions, self._context, None if num_rows is None else rows)
                self._like = hidden.new_empty(0)
                self._hidden_size = hidden.shape[1]
            case Logits(count):
                self._model.logits(self._group.broadcast(self._like.new_empty((count, self._hidden_size))))
            case Decode(spans, token_ids):
                assert self._graphs is not None
                self._graphs.run(self._lists.read(spans), token_ids)
            case Keep(count):
                assert self._graphs is not None
                self._graphs.keep(*self._receive(2, count))
            case Start():
                raise ValueError("this rank has started already")
            case _:
                assert_never(message)

    def _receive(self, *shape: int) -> torch.Tensor:
        """int64 of rank 0."""
        return self._group.broadcast(torch.empty(shape, dtype=torch.int64, device=self._device))


def main() -> None:
    """Runs until rank 0 ends."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for rank 0, which finishes its requests before it ends
        signal.signal(number, signal.SIG_IGN)
    lifeline = int(sys.argv[1])
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    told = messages(sys.stdin.buffer)
    start = next(told)
    assert isinstance(start, Start)
    config = msgspec.msgpack.decode(start.config, type=EngineConfig)
    group = TensorParallelGroup(start.rank, start.size, config.device, Path(start.meeting))
    try:
        engine = Engine.build_rank(Path(start.folder), config, group)
    except (ModelError, KVCacheError):
        time.sleep(_PATIENCE)  # rank 0 meets the same error and tells of it
        raise
    follower = Follower(engine, group)
    with torch.inference_mode():
        for message in told:
            follower.follow(message)


def _end_with(lifeline: int) -> None:
    """Ends this process, whatever it is waiting for, as soon as rank 0 is gone."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
