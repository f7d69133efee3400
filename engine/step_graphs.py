"""CUDA graphs of steps: hundreds of kernels start by one call, for steps padded to a few shapes.

A decode step is mostly the reading of weights, and takes a few milliseconds; starting its kernels one by one would take
the CPU far longer, and those of a step with a short prompt about as long as they run. Graphs are captured at start, the
largest first, so that all share one pool of memory.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.attention.base import Span
from engine.attention.paged import IntArray, PagedBackend, PagedContext, spaced
from engine.kernels.paged_attention import MOST_SPLIT_TILES
from engine.runner import Model
from engine.sampler import best_tokens
from engine.step_shapes import StepShape, fitting


class StepGraphs:
    """Graphs of one model and cache. A padded token has table row -1, and a padded tile no rows: kernels skip them."""

    def __init__(
        self,
        model: Model,
        backend: PagedBackend,
        shapes: Sequence[StepShape],
        vocab_size: int,
        on_layer: Callable[[bool, int], None],
    ) -> None:
        """Captures a graph for each shape. Logits beyond `vocab_size` are cut off.

        What `on_layer` starts on the device becomes part of the graphs; it is told whether there are prompts, and the
        layer.
        """
        self._model = model
        self._backend = backend
        self._shapes = shapes
        self._vocab_size = vocab_size
        self._on_layer = on_layer
        self._inputs = torch.zeros(
            max(spaced(self._lengths(shape))[-1] for shape in shapes), dtype=torch.int32, device=backend.device
        )
        # By table row, the token that each sequence sampled last: its next step takes it from here.
        self.last_tokens = torch.zeros(len(backend.tables.tensor), dtype=torch.int32, device=backend.device)
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._logits = torch.empty(0)  # [wanted, vocab_size], of whichever graph ran last
        self._tokens: dict[StepShape, torch.Tensor] = {}
        pool = None
        # The first one has the most logits.
        for shape in sorted(shapes, key=lambda shape: (shape.wanted, shape.tokens), reverse=True):
            self._send(shape, [], [], [], [], [], [])
            graph = torch.cuda.CUDAGraph()
            self._compute(shape)  # compiles kernels and lets libraries allocate
            torch.cuda.synchronize()
            # Of this thread only: NCCL's own looks after its events meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._tokens[shape] = self._compute(shape)
            pool = graph.pool()
            self._graphs[shape] = graph

    def shape_of(self, spans: Sequence[Span], wanted: int) -> StepShape | None:
        """Shape to which a step of these spans is padded that wants logits of so many tokens; None: there is none."""
        return fitting(self._shapes, [span.length for span in spans], wanted)

    def run(
        self, shape: StepShape, spans: Sequence[Span], token_ids: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits [W, vocab_size], best tokens, table rows) of the W wanted tokens, in a step of `shape_of` the spans.

        A sequence whose token id is below 0 goes on with that which it sampled last. A best token is -1 where logits
        are not finite. Tokens and rows are int64 [W]; logits last until the next run.
        """
        count = len(wanted)
        *indices, _ = self._backend.indices(spans)
        self._send(shape, token_ids, *indices, wanted if shape.prompts else [])
        self._graphs[shape].replay()
        _, _, rows, _, _, at = self._parts(shape)
        rows = rows[at[:count]] if shape.prompts else rows[:count]
        return self._logits[:count], self._tokens[shape][:count].clone(), rows.long()

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """The sequences of table rows int64 [M] have sampled these tokens int64 [M]."""
        self.last_tokens.index_copy_(0, rows, tokens.int())

    def known(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Token ids int [N]; for each below 0 that which the sequence of its table row, int [N], has sampled last."""
        sampled = self.last_tokens[rows.clamp(min=0)].to(token_ids.dtype)
        return torch.where(token_ids < 0, sampled, token_ids).clamp(min=0)

    def _compute(self, shape: StepShape) -> torch.Tensor:
        """The best tokens int64 [shape.wanted]; their logits are in the tensor that all graphs share."""
        given, positions, table_rows, decodes, tiles, wanted = self._parts(shape)
        token_ids = self.known(given, table_rows[: shape.tokens])
        on_layer = partial(self._on_layer, shape.prompts > 0)
        pieces = tiles.view(-1, 4) if shape.prompts else None
        context = PagedContext(self._backend, positions, table_rows, decodes, pieces, on_layer)
        hidden = self._model.forward(token_ids, positions, context, wanted if shape.prompts else None)
        logits = self._model.logits(hidden)[:, : self._vocab_size]
        if not len(self._logits):
            self._logits = torch.empty_like(logits)
        return best_tokens(self._logits[: shape.wanted].copy_(logits))

    # Inputs: ids, positions and table rows of tokens, and of one padded token more; decodes; tiles; wanted tokens

    def _lengths(self, shape: StepShape) -> tuple[int, ...]:
        tiles = max(shape.tokens // self._backend.tile + shape.prompts, MOST_SPLIT_TILES) if shape.prompts else 0
        wanted = shape.wanted if shape.prompts else 0
        return shape.tokens, shape.tokens, shape.tokens + 1, shape.decodes, 4 * tiles, wanted

    def _parts(self, shape: StepShape) -> list[torch.Tensor]:
        lengths = self._lengths(shape)
        starts = spaced(lengths)
        return [self._inputs[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _send(self, shape: StepShape, *parts: Sequence[int] | IntArray) -> None:
        """Pads and sends the parts in one transfer."""
        starts = spaced(self._lengths(shape))
        padding = (0, 0, -1, shape.tokens, 0, 0)
        pinned = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
        host = pinned.numpy()
        for start, end, part, value in zip(starts[:-1], starts[1:], parts, padding, strict=True):
            host[start : start + len(part)] = part
            host[start + len(part) : end] = value
        self._inputs[: starts[-1]].copy_(pinned, non_blocking=True)
