"""Pages are packed on a CUDA device as they are on CPU. Needs a device, torch, msgspec, xxhash and pytest."""

import pytest
import torch

from engine.kv_cache import KVCache, KVCacheSpec
from engine.request import Request, SamplingParams
from kv_transfer.checksums import page_sums
from kv_transfer.messages import Order
from kv_transfer.plan import TransferPlan
from kv_transfer.references import BlockRef

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FP8 = torch.float8_e4m3fn
LAYERS, HEADS, DIM, TOKENS = 4, 8, 64, 150


def spec(size: int, dtype: torch.dtype, ranks: int = 1, scales: tuple[tuple[int, int], ...] = ()) -> KVCacheSpec:
    return KVCacheSpec(LAYERS, size, HEADS // ranks, DIM, dtype, ranks, scales)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (spec(16, torch.bfloat16), spec(16, torch.bfloat16)),
        (spec(16, torch.bfloat16), spec(64, torch.bfloat16)),
        (spec(32, torch.bfloat16), spec(24, torch.bfloat16)),
        (spec(16, torch.bfloat16), spec(16, FP8)),
        (spec(16, torch.bfloat16), spec(32, FP8, scales=((-3, 2),) * LAYERS)),
        (spec(16, torch.float32, 2), spec(16, torch.float32, 4)),
        (spec(16, torch.bfloat16, 4), spec(48, FP8, 1)),
    ],
)
def test_packed_as_on_cpu(source: KVCacheSpec, destination: KVCacheSpec) -> None:
    plan = TransferPlan(source.layout, destination.layout)
    num_blocks = 20
    pages = KVCache(source, source.ranks * num_blocks).tensor
    pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(1)) * 200)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    count = -(-TOKENS // destination.block_size) * destination.ranks
    order = Order(
        transfer_id="r/0",
        request=Request(request_id="r/0", prompt_token_ids=list(range(TOKENS)), sampling=SamplingParams()),
        blocks=[BlockRef("", number, 0) for number in range(count)],
        skip_blocks=0,
        reply_to="",
        lease_seconds=1.0,
    )
    device = pages.cuda()
    packed = KVCache(destination, count).tensor
    for layer in range(LAYERS):
        for push in plan.pushes(pages, range(layer, layer + 1), blocks, order, 0, TOKENS):
            taken = push.source[:, layer].view(torch.uint8)[list(push.source_rows)]
            packed[:, layer].view(torch.uint8)[[ref.block_id for ref in push.blocks]] = taken
    expected_sums = page_sums(packed.cuda(), range(count))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second: what would be packed on this stream, sums would not find
    assert plan.checksums(device, blocks, order) == expected_sums
    torch.cuda.synchronize()
    for start, end in ((0, 70), (70, TOKENS)):
        on_cpu = list(plan.pushes(pages, range(2, 3), blocks, order, start, end))
        on_device = list(plan.pushes(device, range(2, 3), blocks, order, start, end))
        for ours, theirs in zip(on_device, on_cpu, strict=True):
            assert ours.source.device.type == "cuda"
            assert (ours.source_rows, ours.blocks) == (theirs.source_rows, theirs.blocks)
            rows = list(ours.source_rows)
            found, expected = (p.source[:, 2].view(torch.uint8)[rows].cpu() for p in (ours, theirs))
            assert torch.equal(found, expected)
