"""The paged CPU attention against a dense one, and its promise that a row never depends on its company."""

import mmap

import pytest
import torch

from engine.attention.base import LayerKind, Span
from engine.attention.sdpa import SdpaBackend, padded_context
from engine.kv_cache import KVCache, KVCacheError, KVCacheSpec

LAYERS = 2


class Sequences:
    """Random queries, keys and values of some sequences, with shuffled pages in one cache."""

    def __init__(self, lengths, heads=6, kv_heads=2, dim=16, block_size=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(blocks) + 3, generator=generator)).tolist()
        self.block_ids = [[order.pop() for _ in range(count)] for count in blocks]
        spec = KVCacheSpec(LAYERS, block_size, kv_heads, dim, torch.float32)
        self.cache = KVCache(spec, sum(blocks) + 3)
        self.cache.tensor.fill_(torch.nan)  # what an earlier owner left must not matter
        self.backend = SdpaBackend(self.cache, LayerKind(heads, dim**-0.5))
        self.q = [torch.randn(LAYERS, n, heads, dim, generator=generator) for n in lengths]
        self.k = [torch.randn(LAYERS, n, kv_heads, dim, generator=generator) for n in lengths]
        self.v = [torch.randn(LAYERS, n, kv_heads, dim, generator=generator) for n in lengths]

    def step(self, *pieces, on_layer=None):
        """Computes pieces (sequence, start, length); returns [LAYERS, length, heads, dim] of each."""
        spans = [Span(self.block_ids[s], start, length) for s, start, length in pieces]
        context = self.backend.plan(spans, on_layer)
        outs = []
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat([x[s][layer, start : start + length] for s, start, length in pieces])
                for x in (self.q, self.k, self.v)
            )
            outs.append(context.forward(layer, q, k, v))
        return torch.stack(outs).split([length for _, _, length in pieces], dim=1)

    def dense(self, sequence):
        """The same by plain causal attention over the whole sequence, in float64."""
        q, k, v = (x[sequence].double().transpose(1, 2) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 9, "kv_heads": 3, "dim": 64},
        {"heads": 4, "kv_heads": 4, "dim": 16},
        {"heads": 8, "kv_heads": 1, "dim": 32},
        {"heads": 14, "kv_heads": 2, "dim": 64, "block_size": 32},
        {"heads": 6, "kv_heads": 2, "dim": 24, "block_size": 5},
    ],
)
def test_equals_dense_attention(shape):
    lengths = [1, 7, 33, 150, 260, 700]
    sequences = Sequences(lengths, **shape)
    outs = [[] for _ in lengths]
    done = [0] * len(lengths)
    for chunk in (1, 3, 40, 1, 130, 1, 600):  # every step mixes chunks of all sequences that still have tokens
        pieces = [(s, done[s], min(chunk + s, n - done[s])) for s, n in enumerate(lengths) if done[s] < n]
        for (s, _, length), out in zip(pieces, sequences.step(*pieces), strict=True):
            outs[s].append(out)
            done[s] += length
    assert done == lengths
    for s in range(len(lengths)):
        torch.testing.assert_close(torch.cat(outs[s], 1).double(), sequences.dense(s), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (14, 2, 64), (16, 8, 128), (5, 1, 80)])
def test_rows_do_not_depend_on_company_or_chunking(heads, kv_heads, dim):
    lengths = [30, 131, 215, 390, 530, 700, 725, 900, 64]
    sequences = Sequences(lengths, heads, kv_heads, dim)
    whole = [sequences.step((s, 0, n))[0] for s, n in enumerate(lengths)]

    chunked = [[] for _ in lengths]
    for start in range(0, max(lengths), 48):  # other chunk borders, all sequences in one batch
        pieces = [(s, start, min(48, n - start)) for s, n in enumerate(lengths) if start < n]
        for (s, _, _), out in zip(pieces, sequences.step(*pieces), strict=True):
            chunked[s].append(out)
    for s in range(len(lengths)):
        assert torch.equal(torch.cat(chunked[s], 1), whole[s]), f"sequence {s} in chunks"

    together = sequences.step(*[(s, n - 1, 1) for s, n in enumerate(lengths)])
    for s, n in enumerate(lengths):
        alone = sequences.step((s, n - 1, 1))[0]
        assert torch.equal(together[s], alone), f"sequence {s} decoded in a batch"
        assert torch.equal(whole[s][:, -1:], alone), f"sequence {s} decoded after its prompt"


def test_padding_is_legal_and_small():
    lengths = torch.arange(1, 3000).numpy()
    padded = padded_context(lengths)
    inside = (padded - 1) % 512 + 1
    assert (padded >= lengths).all() and (padded % 16 == 0).all()
    assert ((inside <= 192) | (inside == 512)).all()
    assert ((lengths - 1) // 512 == (padded - 1) // 512).all()


def test_layers_are_announced_when_their_kv_is_in_the_cache():
    sequences = Sequences([20])
    seen = []

    def on_layer(layer):
        first, second = sequences.block_ids[0]
        stored = torch.cat([sequences.cache.layer(layer)[first], sequences.cache.layer(layer)[second, :4]])
        expected = torch.cat((sequences.k[0][layer], sequences.v[0][layer]), dim=-1)
        seen.append((layer, torch.equal(stored, expected)))

    sequences.step((0, 0, 20), on_layer=on_layer)
    assert seen == [(0, True), (1, True)]


def test_what_the_backend_cannot_do_is_refused():
    cache = KVCache(KVCacheSpec(1, 16, 2, 8, torch.float32), 1)
    with pytest.raises(ValueError, match="sliding"):
        SdpaBackend(cache, LayerKind(4, 1.0, sliding_window=8))
    with pytest.raises(ValueError, match="evenly"):
        SdpaBackend(cache, LayerKind(3, 1.0))


def test_cache_lies_in_the_given_memory_block_after_block():
    spec = KVCacheSpec(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert spec.layer_bytes == 4 * 2 * 16 * 2 and spec.block_bytes == 3 * spec.layer_bytes
    memory = mmap.mmap(-1, 5 * spec.block_bytes)
    memory.write(b"\xff" * len(memory))
    cache = KVCache(spec, 5, memory)
    assert not cache.tensor.any()
    cache.layer(1)[2].fill_(1.0)
    block = memory[2 * spec.block_bytes : 3 * spec.block_bytes]
    assert block == cache.block_bytes_view(2)
    one = torch.ones(spec.layer_bytes // 2, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert block == bytes(spec.layer_bytes) + one + bytes(spec.layer_bytes)

    other = KVCache(spec, 5)
    other.block_bytes_view(4)[:] = cache.block_bytes_view(2)
    assert torch.equal(other.tensor[4], cache.tensor[2])


def test_layout_names_all_that_decides_the_bytes():
    shape = {"num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    changes = [{"num_layers": 2}, {"block_size": 8}, {"num_kv_heads": 4}, {"head_dim": 4}, {"dtype": torch.bfloat16}]
    layouts = {KVCacheSpec(**(shape | change)).layout for change in [{}, *changes]}
    assert len(layouts) == 1 + len(changes)


def test_unfit_memory_is_refused():
    spec = KVCacheSpec(1, 4, 1, 8, torch.float32)
    with pytest.raises(KVCacheError, match="at least one block"):
        KVCache(spec, 0)
    with pytest.raises(KVCacheError, match=f"{2 * spec.block_bytes} bytes"):
        KVCache(spec, 2, bytearray(spec.block_bytes))
    with pytest.raises(KVCacheError, match="read-only"):
        KVCache(spec, 1, bytes(spec.block_bytes))
    with pytest.raises(KVCacheError, match="block 1"):
        KVCache(spec, 1).block_bytes_view(1)
