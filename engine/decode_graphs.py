"""CUDA graphs of decode steps: hundreds of kernels start by one call, for batches padded to a few sizes.

A step is mostly the reading of weights, and takes a few milliseconds; starting its kernels one by one would take the
CPU as long. Graphs are captured at start, the largest first, so that all share one pool of memory.
"""

from collections.abc import Callable, Sequence

import torch

from engine.attention.base import Span
from engine.attention.paged import PagedBackend, PagedContext
from engine.runner import Model
from engine.sampler import best_tokens

_SMALL = (1, 2, 4)
_STEP = 8  # sizes beyond: the multiples of this up to 64, then of more


def batch_sizes(largest: int) -> list[int]:
    """Sizes to which batches of up to `largest` are padded, ascending."""
    sizes = [size for size in _SMALL if size < largest]
    size = _STEP
    while size < largest:
        sizes.append(size)
        size += _STEP if size < 64 else 2 * _STEP if size < 256 else 4 * _STEP
    return [*sizes, largest]


class DecodeGraphs:
    """Graphs of one model and cache. A padded row has table row -1: kernels skip it."""

    def __init__(
        self, model: Model, backend: PagedBackend, largest: int, vocab_size: int, on_layer: Callable[[int], None]
    ) -> None:
        """Captures graphs for batches of up to `largest` sequences. Logits beyond `vocab_size` are cut off.

        What `on_layer` starts on the device for a layer becomes part of the graphs.
        """
        self._backend = backend
        self._on_layer = on_layer
        self._sizes = batch_sizes(largest)
        self._inputs = torch.zeros((3, largest), dtype=torch.int32, device=backend.device)  # ids, positions, table rows
        self._inputs[2] = -1
        # By table row, the token that each sequence sampled last: its next step takes it from here.
        self.last_tokens = torch.zeros(len(backend.tables.tensor), dtype=torch.int32, device=backend.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        pool = None
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            self._compute(model, size, vocab_size)  # compiles kernels and lets libraries allocate
            torch.cuda.synchronize()
            # Of this thread only: NCCL's own looks after its events meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._logits[size], self._tokens[size] = self._compute(model, size, vocab_size)
            pool = graph.pool()
            self._graphs[size] = graph

    def _compute(self, model: Model, size: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        given, positions, table_rows = self._inputs[:, :size]
        rows = table_rows.clamp(min=0)
        token_ids = torch.where(given < 0, self.last_tokens[rows], given).clamp(min=0)
        every = torch.arange(size, dtype=torch.int32, device=self._backend.device)
        context = PagedContext(self._backend, positions, table_rows, every, None, self._on_layer)
        logits = model.logits(model.forward(token_ids, positions, context))[:, :vocab_size]
        return logits, best_tokens(logits)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """The sequences of table rows int64 [M] have sampled these tokens int64 [M]."""
        self.last_tokens.index_copy_(0, rows, tokens.int())

    @property
    def largest(self) -> int:
        """Sequences of a batch at most."""
        return self._sizes[-1]

    def known(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [N]; for each below 0 that which the sequence of its table row, int [N], has sampled last."""
        return torch.where(token_ids < 0, self.last_tokens[rows].long(), token_ids).clamp(min=0)

    def run(self, spans: Sequence[Span], token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits [B, vocab_size], best tokens, table rows) of spans of one token each; logits last until the next run.

        A sequence whose token id is below 0 goes on with that which it sampled last. A best token is -1 where logits
        are not finite. Tokens and rows are int64 [B].
        """
        count = len(spans)
        size = next(size for size in self._sizes if size >= count)
        pinned = torch.empty((3, size), dtype=torch.int32, pin_memory=True)
        host = pinned.numpy()
        host[0, :count] = token_ids
        host[1, :count] = [span.start for span in spans]
        host[2, :count] = self._backend.tables.rows_of([span.block_ids for span in spans])
        host[:2, count:] = 0
        host[2, count:] = -1
        self._inputs[:, :size].copy_(pinned, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[size][:count], self._tokens[size][:count].clone(), self._inputs[2, :count].long()
