"""Rank 0: starts the other ranks, and has them compute whatever it computes.

Runners know nothing of ranks: they are given stand-ins for model, attention backend and graphs, whose calls are sent to
the other ranks and then made here.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from engine.attention.base import AttentionBackend, AttentionContext, Span
from engine.memory import DoesNotFit
from engine.parallel.group import RankError, TensorParallelGroup
from engine.parallel.messages import Forward, Keep, Logits, Meet, Message, Plan, Replay, SpanWriter, Start, framed
from engine.runner import Model

if TYPE_CHECKING:
    from engine.step_graphs import StepGraphs
    from engine.step_shapes import StepShape

_DYING_SECONDS = 1.0  # a connection may break a moment before its process is gone

M = TypeVar("M")
A = TypeVar("A")
G = TypeVar("G")
OnRankLost = Callable[[RankError], object]


class LeadingGroup(TensorParallelGroup):
    """Starts the other ranks' processes; they end with this one, however it ends.

    `config` is an EngineConfig, encoded; `rows` at least the sequences that an attention backend keeps tables of.
    `on_lost` is told, on another thread, that a rank has died: what waits for it here may wait forever.
    """

    def __init__(
        self, folder: Path, size: int, device: str, config: bytes, rows: int, on_lost: OnRankLost = lambda error: None
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        meeting = Path(self._directory.name) / "meeting"
        super().__init__(0, size, device, meeting)
        self._on_lost = on_lost
        self._closing = False
        self.spans = SpanWriter(rows)
        # Never written to: a rank that sees its end knows that this process is gone.
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "engine.parallel.follow", str(lifeline)]
        try:
            self._processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(lifeline,)) for _ in range(1, size)
            ]
        finally:
            os.close(lifeline)
        for rank, process in enumerate(self._processes, 1):
            start = Start(rank, size, str(meeting), str(folder), config)
            self._write(process, framed(start))
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def lead(self, model: M, attention: A, graphs: G) -> tuple[M, A, G]:
        """See `Group.lead`."""
        leader: Any = self
        return (
            cast(M, LedModel(cast(Model, model), leader)),
            cast(A, LedAttention(cast(AttentionBackend, attention), leader)),
            cast(G, graphs and LedGraphs(cast("StepGraphs", graphs), leader)),
        )

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        """See `Group.together`. Raises RankError if any of that fails."""
        try:
            frame = framed(message)
            for process in self._processes:
                self._write(process, frame)
            yield
        except DoesNotFit:
            raise
        except Exception as error:
            raise self._lost() or RankError(f"a step failed on rank 0, and the others wait: {error!r}") from error

    def meet(self) -> None:
        """Waits until all ranks have done what they were told before."""
        with self.together(Meet()):
            super().meet()

    def close(self) -> None:
        """Ends the other ranks."""
        if self._closing:
            return
        self._closing = True
        super().close()
        os.close(self._lifeline)
        for process in self._processes:
            process.kill()  # it holds nothing that anybody needs
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        self._directory.cleanup()

    def _write(self, process: "subprocess.Popen[bytes]", frame: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(frame)
        process.stdin.flush()

    def _watch(self, rank: int) -> None:
        self._processes[rank - 1].wait()
        if not self._closing and (error := self._lost()) is not None:
            self._on_lost(error)

    def _lost(self) -> RankError | None:
        """Which rank has died, and how."""
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            for rank, process in enumerate(self._processes, 1):
                if (code := process.poll()) is not None:
                    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}, see above"
                    return RankError(f"rank {rank} of {self.size} (process {process.pid}) {how}")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)


class LedModel:
    """A model of which every rank has a share."""

    def __init__(self, model: Model, group: LeadingGroup) -> None:
        self._model = model
        self._group = group

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`; `attention` is what was planned last."""
        with self._group.together(Forward(None if rows is None else len(rows))):
            self._group.broadcast(token_ids if rows is None else torch.cat((token_ids, rows)))
            return self._model.forward(token_ids, positions, attention, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        with self._group.together(Logits(len(hidden))):
            self._group.broadcast(hidden.contiguous())
            return self._model.logits(hidden)


class LedAttention:
    """An attention backend that every rank has, for its own heads."""

    def __init__(self, backend: AttentionBackend, group: LeadingGroup) -> None:
        self._backend = backend
        self._group = group

    @property
    def device(self) -> torch.device:
        """Of rank 0."""
        device: torch.device = self._backend.device  # type: ignore[attr-defined]
        return device

    def plan(self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None) -> AttentionContext:
        """See `AttentionBackend.plan`."""
        with self._group.together(Plan(self._group.spans.write(spans))):
            return self._backend.plan(spans, on_layer)


class LedGraphs:
    """Graphs of steps that every rank has, with the collectives in them."""

    def __init__(self, graphs: "StepGraphs", group: LeadingGroup) -> None:
        self._graphs = graphs
        self._group = group

    def shape_of(self, spans: Sequence[Span], wanted: int) -> "StepShape | None":
        """See `StepGraphs.shape_of`."""
        return self._graphs.shape_of(spans, wanted)

    def known(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `StepGraphs.known`."""
        return self._graphs.known(token_ids, rows)

    def run(
        self, shape: "StepShape", spans: Sequence[Span], token_ids: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `StepGraphs.run`."""
        with self._group.together(Replay(self._group.spans.write(spans), list(token_ids), list(wanted))):
            return self._graphs.run(shape, spans, token_ids, wanted)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """See `StepGraphs.keep`. The tokens reach the other ranks on their devices, behind the step."""
        with self._group.together(Keep(len(tokens))):
            self._group.broadcast(torch.stack((rows, tokens)))
            self._graphs.keep(rows, tokens)
