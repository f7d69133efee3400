"""Whatever the two layouts are, the receiver's pages hold the bytes that the sequence's KV has in its own layout."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import KVCache, KVCacheSpec
from engine.request import Request, SamplingParams
from kv_transfer.checksums import page_sums
from kv_transfer.messages import Order
from kv_transfer.plan import PlanError, TransferPlan
from kv_transfer.references import BlockRef

LAYERS, HEADS, DIM = 3, 4, 8
FP8 = torch.float8_e4m3fn


def spec(
    block_size: int, dtype: torch.dtype = torch.float32, ranks: int = 1, scales: tuple[tuple[int, int], ...] = ()
) -> KVCacheSpec:
    return KVCacheSpec(LAYERS, block_size, HEADS // ranks, DIM, dtype, ranks, scales)


def stored(values: torch.Tensor, to: KVCacheSpec) -> torch.Tensor:
    """[T, L, H, 2, D] of the model as the numbers that a cache of `to` holds."""
    scales = torch.tensor(to.scales or ((0, 0),) * LAYERS)
    divided = values / torch.exp2(scales.float())[:, None, :, None]
    return divided.clamp(-448, 448).to(FP8) if to.dtype == FP8 else divided.to(to.dtype)


class Side:
    """Pages of all ranks of a worker, its blocks of a sequence at random places."""

    def __init__(self, of: KVCacheSpec, num_tokens: int, rng: random.Random) -> None:
        needed = -(-num_tokens // of.block_size)
        self.spec = of
        self.num_blocks = needed + 3
        self.pages = KVCache(of, of.ranks * self.num_blocks).tensor
        self.pages.view(torch.uint8).fill_(0x33)
        self.blocks = rng.sample(range(self.num_blocks), needed)

    def write(self, stored: torch.Tensor) -> None:
        """Puts tokens [T, L, H, 2, D] where attention on each rank puts them."""
        for token, numbers in enumerate(stored.view(torch.uint8)):
            block, slot = self.blocks[token // self.spec.block_size], token % self.spec.block_size
            for rank in range(self.spec.ranks):
                heads = numbers[:, rank * self.spec.num_kv_heads : (rank + 1) * self.spec.num_kv_heads]
                page = self.pages.view(torch.uint8)[rank * self.num_blocks + block]
                page[:, slot] = heads.flatten(2)

    def read(self, num_tokens: int) -> torch.Tensor:
        """The tokens again, as bytes [T, L, H, 2 * D]."""
        found = []
        for token in range(num_tokens):
            block, slot = self.blocks[token // self.spec.block_size], token % self.spec.block_size
            ranks = [
                self.pages.view(torch.uint8)[rank * self.num_blocks + block, :, slot] for rank in range(self.spec.ranks)
            ]
            found.append(torch.cat(ranks, dim=1))
        return torch.stack(found)

    def order(self, skip: int, num_tokens: int) -> Order:
        """All blocks but the first `skip` are wanted."""
        blocks = [
            BlockRef("i", rank * self.num_blocks + block, 0)
            for block in self.blocks[skip:]
            for rank in range(self.spec.ranks)
        ]
        request = Request(request_id="r/0", prompt_token_ids=list(range(num_tokens)), sampling=SamplingParams())
        return Order("r/0", request, blocks, skip, "", 1.0)


def transfer(source: Side, destination: Side, plan: TransferPlan, chunks: list[tuple[int, int]], skip: int) -> None:
    """Pushes layer by layer and chunk by chunk, as a prefill worker does; then compares checksums."""
    order = destination.order(skip, chunks[-1][1])
    for start, end in chunks:
        for layer in range(LAYERS):
            for push in plan.pushes(source.pages, range(layer, layer + 1), source.blocks, order, start, end):
                assert push.source.shape[1:] == destination.pages.shape[1:]
                assert push.source.dtype == destination.pages.dtype
                for row, ref in zip(push.source_rows, push.blocks, strict=True):
                    written = push.source[:, layer].flatten(1).view(torch.uint8)[row]
                    destination.pages[ref.block_id, layer].flatten().view(torch.uint8).copy_(written)
    sums = plan.checksums(source.pages, source.blocks, order)
    assert sums == page_sums(destination.pages, [ref.block_id for ref in order.blocks])


SIZES = st.sampled_from([1, 2, 3, 4, 6, 16])
RANKS = st.sampled_from([1, 2, 4])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_token_lands_where_the_receivers_own_attention_would_have_put_it(data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    scales = tuple(data.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))) for _ in range(LAYERS))
    fp8 = data.draw(st.booleans())
    of = spec(data.draw(SIZES), dtype, data.draw(RANKS))
    to = spec(
        data.draw(SIZES), FP8 if fp8 else dtype, data.draw(RANKS), scales if fp8 and data.draw(st.booleans()) else ()
    )
    num_tokens = data.draw(st.integers(1, 40))
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(1, 40), max_size=4))})
    chunks = [(start, end) for start, end in itertools.pairwise(cuts) if end <= num_tokens]
    rng = random.Random(data.draw(st.integers(0, 1000)))
    values = (
        torch.randn(num_tokens, LAYERS, HEADS, 2, DIM, generator=torch.Generator().manual_seed(num_tokens)) * 40
    ).to(dtype)
    source, destination = Side(of, num_tokens, rng), Side(to, num_tokens, rng)
    source.write(values)
    skip = data.draw(st.integers(0, len(destination.blocks) - 1))
    untouched = destination.pages.view(torch.uint8).clone()
    transfer(source, destination, TransferPlan(of.layout, to.layout), chunks, skip)

    expected = stored(values.float() if fp8 else values, to).view(torch.uint8).flatten(3)
    first = skip * to.block_size
    assert torch.equal(destination.read(num_tokens)[first:], expected[first:])
    written = {ref.block_id for ref in destination.order(skip, num_tokens).blocks}
    for page in set(range(len(untouched))) - written:
        assert torch.equal(destination.pages.view(torch.uint8)[page], untouched[page])


def test_equal_layouts_copy_nothing() -> None:
    of = spec(4, ranks=2)
    side = Side(of, 12, random.Random(1))
    plan = TransferPlan(of.layout, of.layout)
    pushes = list(plan.pushes(side.pages, range(1, 2), side.blocks, side.order(1, 12), 0, 12))
    assert [push.source.data_ptr() for push in pushes] == [side.pages.data_ptr()] * 2
    assert [list(push.source_rows) for push in pushes] == [
        [rank * side.num_blocks + block for block in side.blocks[1:]] for rank in range(2)
    ]


def test_fp8_is_within_its_rounding_and_nothing_overflows() -> None:
    of, to = spec(4), spec(8, FP8)
    values = torch.randn(16, LAYERS, HEADS, 2, DIM) * 200
    source, destination = Side(of, 16, random.Random(2)), Side(to, 16, random.Random(3))
    source.write(values)
    transfer(source, destination, TransferPlan(of.layout, to.layout), [(0, 16)], 0)
    found = destination.read(16).view(FP8).float().view(values.shape)
    inside = values.abs() <= 448
    assert ((found - values).abs()[inside] <= values.abs()[inside] / 16 + 2**-10).all()
    assert torch.equal(found[~inside], values[~inside].sign() * 448)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (KVCacheSpec(LAYERS + 1, 4, HEADS, DIM, torch.float32), "4 layers, ours 3"),
        (KVCacheSpec(LAYERS, 4, HEADS, DIM, torch.float32, 2), "8 KV heads, ours 4"),
        (KVCacheSpec(LAYERS, 4, HEADS, DIM * 2, torch.float32), "16 numbers in a head, ours 8"),
    ],
)
def test_other_models_are_refused(other: KVCacheSpec, what: str) -> None:
    with pytest.raises(PlanError, match=f"have {what}: serve the same model"):
        TransferPlan(spec(4).layout, other.layout)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "layers=3",
        spec(4).layout.replace("tokens=4", "tokens=0"),
        spec(4).layout.replace("float32", "int4"),
        spec(4).layout.replace("8+8", "8+16"),
        spec(4).layout + ",scales=1:1",
        spec(4).layout + "\n",
        "layers=" + "9" * 4000,
    ],
)
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(PlanError, match="is no layout of KV blocks"):
        TransferPlan(spec(4).layout, layout)


@given(SIZES, DTYPES, RANKS, st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=3))
def test_a_layout_names_its_spec(size: int, dtype: torch.dtype, ranks: int, scales: list[tuple[int, int]]) -> None:
    for of in (spec(size, dtype, ranks), spec(size, FP8, ranks, tuple(scales))):
        assert KVCacheSpec.parse(of.layout) == of
