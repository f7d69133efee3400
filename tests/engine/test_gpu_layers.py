"""What `Engine.on_layers` is told of: KV that whoever reads it behind the engine's work finds whole, as pushes do."""

import contextlib
from collections.abc import Sequence

import pytest
import torch

from engine.engine import Engine, EngineConfig
from engine.request import Request, SamplingParams
from engine.step import Entry

PAGE = 16


def reading(ids: list[int], pages: torch.Tensor) -> torch.Tensor:
    """Pages by number, and the CPU does not wait for what is computed before."""
    if pages.is_cpu:
        return pages[ids]
    from engine.kernels.copy_rows import on_device

    return pages.index_select(0, on_device(ids, pages.device))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
@pytest.mark.parametrize("num_blocks", [200, 60])
def test_prompts_are_read_whole_beside_all_that_an_engine_does(device: str, num_blocks: int) -> None:
    """Steps begun ahead, in graphs and not, preempted and aborted requests, those whose tokens the CPU chooses."""
    from bench.gpu_engine import SMALL, folder_of

    config = EngineConfig(
        device=device, num_blocks=num_blocks, max_batched_tokens=128, max_running=6, dummy_seed=7, dtype="float32"
    )
    engine = Engine.build(folder_of(SMALL["llama-8b"]), config)
    pages = engine.kv_cache.tensor
    side = None if device == "cpu" else torch.cuda.Stream()  # type: ignore[no-untyped-call]
    read: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    tokens: dict[str, int] = {}

    def told(layers: range, entries: Sequence[Entry]) -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            for entry in entries:
                if (copy := read.get(entry.sequence.request_id)) is not None:
                    first, last = entry.start // PAGE, -(-entry.end // PAGE)
                    found = reading(entry.sequence.block_ids[first:last], pages)
                    copy[first:last, layers.start : layers.stop] = found[:, layers.start : layers.stop]

    engine.on_layers = told
    generator = torch.Generator().manual_seed(1)
    coming = []
    for number, length in enumerate([5, 140, 333, 17, 64, 300, 90, 16, 200, 31, 257, 128, 33, 310, 48, 77, 129, 15]):
        prompt = torch.randint(0, 1000, (length,), generator=generator).tolist()
        slow = {"repetition_penalty": 1.2} if number % 4 == 1 else {}
        hold = number % 3 != 0
        sampling = SamplingParams(max_tokens=1 if hold else 40, temperature=0.0, **slow)
        coming.append((Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling), hold))
    steps = 0
    while coming or engine.has_work():
        if coming and steps % 3 == 0:
            request, hold = coming.pop(0)
            tokens[request.request_id] = len(request.prompt_token_ids)
            if hold:
                read[request.request_id] = torch.zeros(21, *pages.shape[1:], device=device)
            engine.add(request, hold=hold)
            if len(coming) in (4, 9):
                engine.abort(request.request_id)
            if len(coming) == 6:
                engine.abort("9")
        for output in engine.step().outputs:
            assert output.error is None
            if (blocks := engine.held_blocks(output.request_id)) and output.token_ids:
                held[output.request_id] = reading(blocks, pages)
                engine.release(output.request_id)
        steps += 1
    if side is not None:
        torch.cuda.synchronize()
    assert len(held) >= 9 and engine.orphaned_blocks([]) == 0
    for name, blocks in held.items():
        of_tokens = (x[: blocks.shape[0]].transpose(1, 2).flatten(0, 1)[: tokens[name]] for x in (read[name], blocks))
        assert torch.equal(*of_tokens), name
