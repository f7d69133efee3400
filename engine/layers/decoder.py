"""The decoder that the families share: attention and gated MLP, pre-normed, with fused projections.

A family (`engine.models`) says in a few flags what is its own.
"""

import torch
from torch import nn

from engine.attention.base import AttentionContext, HeadNorms
from engine.config import ModelConfig
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary, Rotation
from engine.parallel.group import ALONE, Group
from engine.weights.place import Place


class Attention(nn.Module):
    """Self-attention with grouped KV heads; keys and values go through the paged cache of the context."""

    def __init__(self, config: ModelConfig, layer: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, *(heads * config.head_dim for heads in self.heads), bias=qkv_bias)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.norms = HeadNorms(self.q_norm, self.k_norm) if self.q_norm and self.k_norm else None

    def forward(
        self, norm: RMSNorm, stream: torch.Tensor, rotation: Rotation, attention: AttentionContext
    ) -> torch.Tensor:
        """[N, num_heads * head_dim] of the normed stream [N, hidden], for the output projection."""
        qkv = self.qkv.of_normed(norm, stream)
        return attention.forward_projected(self.layer, qkv, self.heads, self.norms, rotation).flatten(1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), x being the normed stream."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.group = group
        inner = config.intermediate_size
        self.gate_up = GatedLinear(config.hidden_size, inner, inner, bias=config.mlp_bias)
        self.down = Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, norm: RMSNorm, stream: torch.Tensor) -> None:
        """Adds to the stream [N, hidden], in place, what is computed of it, normed."""
        self.group.add_product(stream, self.down, self.gate_up.of_normed(norm, stream))


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on normed input and added to the stream."""

    # Our module to the modules of a checkpoint that it fuses, in order.
    CHECKPOINT = {
        "input_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "post_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    # The dimension along which ranks share a weight: outputs, or inputs, whose products are then added up.
    SPLIT = {"attention.qkv": 0, "attention.output": 1, "mlp.gate_up": 0, "mlp.down": 1}

    def __init__(
        self, config: ModelConfig, layer: int, group: Group, *, qkv_bias: bool, output_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, group)

    def forward(
        self,
        stream: torch.Tensor,
        rotation: Rotation,
        attention: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream [N, hidden] after this layer, changed in place; with `rows` int [M] only those of it."""
        attended = self.attention(self.input_norm, stream, rotation, attention)
        if rows is not None:
            attended, stream = attended[rows], stream[rows]
            if not len(rows):
                return stream
        self.group.add_product(stream, self.attention.output, attended)
        self.mlp(self.post_norm, stream)
        return stream

    def places(self) -> dict[str, Place]:
        """Checkpoint name of each weight, from the layer on, to the rows of our parameters that hold it."""
        modules = dict(self.named_modules())
        return {
            f"{source}.{kind}": self.group.place(part, self.SPLIT.get(ours))
            for ours, sources in self.CHECKPOINT.items()
            if (module := modules.get(ours)) is not None
            for kind, parameter in module.named_parameters()
            for source, part in zip(
                sources, parameter.data.split(getattr(module, "parts", len(parameter))), strict=True
            )
        }


class Decoder(nn.Module):
    """A model over a flat batch of tokens: the whole of it, or what one rank of a group has."""

    # What a family changes.
    qkv_bias: bool | None = None  # None: as the configuration says, and then the output projection has one too
    qk_norm = False

    def __init__(self, config: ModelConfig, group: Group = ALONE) -> None:
        """`config` is the rank's own, with its share of heads and columns (`engine.parallel.group.rank_config`)."""
        super().__init__()
        self.config = config
        self.group = group
        qkv_bias = config.attention_bias if self.qkv_bias is None else self.qkv_bias
        output_bias = config.attention_bias and self.qkv_bias is None
        # With a weight given, it draws none: drawing on the meta device imports torch's compiler, which takes seconds.
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=embedding)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, group, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=self.qk_norm)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size // group.size)
        self.rotary: Rotary | None = None
        self.kv_scales: tuple[tuple[int, int], ...] = ()  # see KVCacheSpec

    def places(self) -> dict[str, Place]:
        """Checkpoint name of each weight to the part of our parameters that holds it, before `finish_loading`."""
        places = {"model.embed_tokens.weight": Place(self.embedding.weight.data)}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            places |= {f"model.layers.{number}.{name}": place for name, place in layer.places().items()}
        places["model.norm.weight"] = Place(self.norm.weight.data)
        if not self.config.tie_word_embeddings:
            places["lm_head.weight"] = self.group.place(self.lm_head.weight.data, 0)
        return places

    def finish_loading(self, device: str) -> None:
        """Ties, packs and precomputes once the weights are in."""
        if self.config.tie_word_embeddings:
            own = self.embedding.weight.detach().chunk(self.group.size)[self.group.rank]
            self.lm_head.weight = nn.Parameter(own, requires_grad=False)
        self.rotary = Rotary(self.config, device)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [N, hidden] of tokens int64 [N] at positions int64 [N]; N tokens of any sequences.

        With `rows` int64 [M], only of those tokens, [M, hidden]: the last layer computes no more than they need.
        """
        assert self.rotary is not None, "finish_loading was not called"
        stream: torch.Tensor = self.embedding(token_ids)
        rotation = self.rotary.at(positions, stream.dtype)
        for layer in self.layers:
            stream = layer(stream, rotation, attention, rows if layer is self.layers[-1] else None)
        return stream

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, vocab] of hidden states [M, hidden]."""
        return self.group.concatenate(self.lm_head.of_normed(self.norm, hidden))
