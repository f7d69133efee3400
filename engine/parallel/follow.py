"""The process of a rank other than 0: loads its share of the model, then makes the calls that rank 0 makes.

`python -m engine.parallel.follow LIFELINE`: messages come on stdin; at the end of the file descriptor LIFELINE, rank 0
is gone.
"""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import assert_never

import msgspec
import torch

from engine import cuda_start
from engine.attention.base import AttentionContext, Span
from engine.config import ModelError
from engine.engine import Engine, EngineConfig
from engine.loaded import LoadedModel, load
from engine.memory import DoesNotFit
from engine.parallel.group import TensorParallelGroup
from engine.parallel.messages import (
    Build,
    Forward,
    Keep,
    Logits,
    Meet,
    Message,
    Plan,
    Replay,
    Room,
    Sleep,
    SpanReader,
    Start,
    Wake,
    messages,
    positions_of,
)

_PATIENCE = 30.0  # seconds


class Follower:
    """Makes calls on one rank's share of an engine."""

    def __init__(self, loaded: LoadedModel, group: TensorParallelGroup) -> None:
        self._loaded = loaded
        self._group = group
        self._device = loaded.model.norm.weight.device
        self._lists = SpanReader()
        self._spans: list[Span] = []
        self._engine: Engine | None = None
        self._context: AttentionContext | None = None

    @property
    def _built(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def follow(self, message: Message) -> None:
        """Makes the call of one message."""
        match message:
            case Build(config):
                self._engine = self._context = None
                if self._device.type == "cuda":
                    cuda_start.give_back()
                self._engine = Engine(self._loaded, msgspec.msgpack.decode(config, type=EngineConfig))
            case Room():
                cuda_start.room(self._built, self._loaded)
            case Meet():
                self._group.meet()
            case Sleep():
                self._context = None
                self._built.release_memory()
            case Wake():
                self._built.take_memory()
            case Plan(spans):
                self._spans = self._lists.read(spans)
                self._context = self._built.computation.attention.plan(self._spans)
            case Forward(num_rows):
                positions = torch.from_numpy(positions_of(self._spans))
                if self._device.type == "cuda":  # without waiting for what the device is doing
                    positions = positions.pin_memory().to(self._device, non_blocking=True)
                given = self._receive(len(positions) + (num_rows or 0))
                token_ids, rows = given[: len(positions)], given[len(positions) :]
                assert self._context is not None
                hidden = self._loaded.model.forward(
                    token_ids, positions, self._context, None if num_rows is None else rows
                )
                self._like = hidden.new_empty(0)
                self._hidden_size = hidden.shape[1]
            case Logits(count):
                self._loaded.model.logits(self._group.broadcast(self._like.new_empty((count, self._hidden_size))))
            case Replay(spans, token_ids, wanted):
                graphs = self._built.computation.graphs
                assert graphs is not None
                self._spans = self._lists.read(spans)
                shape = graphs.shape_of(self._spans, len(wanted))
                assert shape is not None
                graphs.run(shape, self._spans, token_ids, wanted)
            case Keep(count):
                assert self._built.computation.graphs is not None
                self._built.computation.graphs.keep(*self._receive(2, count))
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
        follower = Follower(load(Path(start.folder), config, group, lambda done, total, name: None), group)
        gc.collect()
        gc.freeze()  # as in rank 0, which would wait for a collection here
        with torch.inference_mode():
            for message in told:
                follower.follow(message)
    except (ModelError, DoesNotFit):
        time.sleep(_PATIENCE)  # rank 0 meets the same error and tells of it
        raise


def _end_with(lifeline: int) -> None:
    """Ends this process, whatever it is waiting for, as soon as rank 0 is gone."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
