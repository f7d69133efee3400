"""What a model asks of attention, and what a backend must offer.

Before a step the runner calls `AttentionBackend.plan` once; it turns the step's spans of tokens into index tensors that
serve every layer. The model then calls `AttentionContext.forward` in each layer with that layer's queries, keys and
values.

A backend serves one kind of layer (`LayerKind`), whose KV is one cache group. A model that mixes kinds, such as full
attention and a sliding window, gets a backend and a context for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotation


@dataclass(frozen=True)
class LayerKind:
    """What all layers of one kind share. The number of KV heads and the head size stand in the cache's spec."""

    num_heads: int  # query heads; a multiple of the KV heads
    scale: float  # factor on query @ key
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all before it
    logit_softcap: float | None = None  # scores become cap * tanh(score / cap)


class Span(NamedTuple):
    """Tokens of one sequence to compute in this step: positions `start` to `start + length`."""

    block_ids: Sequence[int]  # blocks of the sequence from position 0 on; they cover the span
    start: int
    length: int


class HeadNorms(NamedTuple):
    """Norms of each query head and key head, for families that have them."""

    query: RMSNorm
    key: RMSNorm


class AttentionContext(ABC):
    """Attention of one step. The step's N tokens stand in the order of its spans."""

    def forward_projected(
        self, layer: int, qkv: torch.Tensor, heads: tuple[int, int, int], norms: HeadNorms | None, rotation: Rotation
    ) -> torch.Tensor:
        """Attention of what the projection gave: norms and rotates, then `forward`.

        qkv [N, sum(heads) * head_dim], `heads` of queries, keys and values; returns [N, num_heads, head_dim].
        """
        both, v = qkv.view(qkv.shape[0], sum(heads), -1).split_with_sizes((heads[0] + heads[1], heads[2]), dim=1)
        if norms is not None:
            q, k = both.split_with_sizes(heads[:2], dim=1)
            both = torch.cat((norms.query(q), norms.key(k)), dim=1)
        q, k = rotation(both).split_with_sizes(heads[:2], dim=1)
        return self.forward(layer, q, k, v)

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores the new keys and values of `layer`, then attends.

        q [N, num_heads, head_dim], k and v [N, num_kv_heads, head_dim], rotated already; returns the shape of q.
        """


class AttentionBackend(ABC):
    """Plans the attention of each step over one paged cache."""

    @abstractmethod
    def plan(self, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None) -> AttentionContext:
        """Prepares one step. `on_layer(layer)` is called as soon as the step's KV of that layer is in the cache."""
