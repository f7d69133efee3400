"""A prompt that gives its blocks back while it is computed for a peer: what is pushed lies where the sums are taken."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from chaos.faults import Faults, dice
from chaos.load import Load
from chaos.mock_engine import BLOCK
from chaos.pair import linked

from engine.engine import StepOutput
from engine.request import Request, SamplingParams
from kv_transfer.messages import Order
from kv_transfer.plan import Push, TransferPlan

PROMPT = [37 * number for number in range(150)]  # of which a step computes 48


async def test_the_blocks_of_another_that_it_finds_later_go_out_from_the_first_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes, checksums = TransferPlan.pushes, TransferPlan.checksums
    pushed: dict[tuple[int, int], int] = {}  # by layer and the receiver's block
    summed: list[list[int]] = []

    def watched_pushes(plan: TransferPlan, *args: Any) -> Iterator[Push]:
        for push in pushes(plan, *args):
            pushed.update(
                {
                    (layer, ref.block_id): row
                    for layer in push.layers
                    for row, ref in zip(push.source_rows, push.blocks, strict=True)
                }
            )
            yield push

    def watched_sums(
        plan: TransferPlan, pages: torch.Tensor, source_blocks: Sequence[int], order: Order, *known: Any
    ) -> list[int]:
        for (layer, block), row in pushed.items():
            at = [ref.block_id for ref in order.blocks].index(block)
            assert row == source_blocks[at], f"block {at} of layer {layer} was pushed from {row}"
        summed.append(list(source_blocks))
        return checksums(plan, pages, source_blocks, order, *known)

    monkeypatch.setattr(TransferPlan, "pushes", watched_pushes)
    monkeypatch.setattr(TransferPlan, "checksums", watched_sums)
    async with linked("shared_memory", Faults(dice(1), {})) as pair:
        engine = pair.prefill.engine
        step, before = engine.step, list[int]()

        def step_and_preempt() -> StepOutput:
            output = step()
            sequence = engine._scheduler.sequences.get("q0/0")
            if sequence is not None and sequence.num_computed_tokens and not before:
                before.extend(sequence.block_ids)
                engine._scheduler._preempt(sequence)
                engine.clear_cache()
                first = SamplingParams(max_tokens=1)
                engine.add(Request(request_id="other", prompt_token_ids=PROMPT[:100], sampling=first, priority=-1))
            return output

        monkeypatch.setattr(engine, "step", step_and_preempt)
        await pair.submit("q0", PROMPT, 2, prefill=pair.endpoint)
        assert not any((await Load(pair).settled()).values())
        assert pair.decode.metrics.transfers.labels("committed")._value.get() == 1
        (after,) = summed
        assert len(before) == 48 // BLOCK and not set(before) & set(after), "the case did not arise"
