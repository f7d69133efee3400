"""The decoder that the families share: attention and gated MLP, pre-normed, with fused projections.

A family (`engine.models`) says in a few flags what is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from engine.config import ModelConfig
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary, rotate

if TYPE_CHECKING:
    from engine.attention.base import AttentionContext


class Attention(nn.Module):
    """Self-attention with grouped KV heads; keys and values go through the paged cache of the context."""

    def __init__(self, config: ModelConfig, layer: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, sum(self.heads) * config.head_dim, qkv_bias)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """x [N, hidden]; cos, sin [N, 1, head_dim]."""
        q, k, v = self.qkv(x).view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = attention.forward(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        y: torch.Tensor = self.output(attended.reshape(x.shape[0], -1))
        return y


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(functional.silu(gate).mul_(up))
        return y


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on normed input and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """[N, hidden] to the same; x is changed in place."""
        x += self.attention(self.input_norm(x), cos, sin, attention)
        x += self.mlp(self.post_norm(x))
        return x


class Decoder(nn.Module):
    """A whole model over a flat batch of tokens."""

    # What a family changes.
    qkv_bias: bool | None = None  # None: as the configuration says
    qk_norm = False

    # Checkpoint name of a projection to (our fused parameter, its slot).
    FUSED = {
        "self_attn.q_proj": ("attention.qkv", 0),
        "self_attn.k_proj": ("attention.qkv", 1),
        "self_attn.v_proj": ("attention.qkv", 2),
        "mlp.gate_proj": ("mlp.gate_up", 0),
        "mlp.up_proj": ("mlp.gate_up", 1),
    }
    RENAMED = {
        "self_attn.o_proj": "attention.output",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "mlp.down_proj": "mlp.down",
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_norm",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        qkv_bias = config.attention_bias if self.qkv_bias is None else self.qkv_bias
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, qkv_bias=qkv_bias, output_bias=config.attention_bias, qk_norm=self.qk_norm)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rotary: Rotary | None = None

    def finish_loading(self, device: str) -> None:
        """Ties, packs and precomputes once the weights are in."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = nn.Parameter(self.embedding.weight.detach(), requires_grad=False)
        self.rotary = Rotary(self.config, device)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext) -> torch.Tensor:
        """Hidden states [N, hidden] of tokens int64 [N] at positions int64 [N]; N tokens of any sequences."""
        assert self.rotary is not None, "finish_loading was not called"
        x: torch.Tensor = self.embedding(token_ids)
        cos, sin = self.rotary.at(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, vocab] of hidden states [M, hidden]."""
        y: torch.Tensor = self.lm_head(self.norm(hidden))
        return y
