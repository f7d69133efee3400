"""Runs steps on a CUDA device, one step ahead of the CPU.

The token that a sequence samples is the input of its next step, and it stays on the device for that. So before the CPU
waits for a step's tokens, it starts the next step of all sequences whose next step is sure but for that token. When the
scheduler then asks for it, it is under way or done; what was computed for a sequence that has ended is dropped. Kernels
of one stream run in order, so blocks that changed hands meanwhile are written by their new owner last.

It starts the next step as late as it can: what comes in meanwhile, such as a new prompt, then waits for one step and
not for two. The device tells when most of a step's layers are done.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Span
from engine.attention.paged import PagedBackend
from engine.decode_graphs import DecodeGraphs
from engine.kernels.signal import signal
from engine.runner import Model, Runner, StepResult, wants_prompt_logprobs
from engine.sampler import Draw, Sampled, Sampler, best_tokens, draw_tokens, is_plain
from engine.scheduler import Entry
from engine.sequence import Sequence as Sequence_

_POLL = 1e-4  # seconds
_NEARLY = 0.75  # of a step's layers: the rest takes longer than starting the next step does


class DeviceProgress:
    """How many steps the device has nearly finished, of a model with so many layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._layer = int(_NEARLY * num_layers)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._view = self._seen.numpy()

    def on_layer(self, layer: int) -> None:
        """To be called after each layer of each step that counts."""
        if layer == self._layer:
            signal(self._counter, self._seen)

    def count(self) -> int:
        """Steps nearly finished."""
        return int(self._view[0])


@dataclass(slots=True)
class _Launched:
    """Tokens under way to the CPU, of sequences that each computed what comes before position `ends`."""

    sequences: list[Sequence_]
    blocks: list[list[int]]  # the sequences' own lists: another one means that they were computed again
    ends: list[int]
    tokens: torch.Tensor  # pinned int64 [M]; -1 where logits were no numbers
    arrived: torch.cuda.Event

    def wait(self) -> list[int]:
        """The tokens."""
        self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


class CudaRunner:
    """One model and one cache on one device."""

    overlaps = True

    def __init__(
        self,
        model: Model,
        attention: PagedBackend,
        sampler: Sampler,
        graphs: DecodeGraphs,
        progress: DeviceProgress,
        max_model_len: int,
        interrupted: Callable[[], bool],
    ) -> None:
        """`interrupted()`: whether somebody waits for the next step to be scheduled; then none is started ahead."""
        torch.cuda.synchronize()
        self._progress = progress
        self._started = progress.count()  # steps
        self._interrupted = interrupted
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._graphs = graphs
        self._max_model_len = max_model_len
        # For what must come back to the CPU step by step.
        self._scoring = Runner(model, attention, sampler, str(attention.device))
        self._ahead: _Launched | None = None

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry], on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Computes the entries; see `Runner.run`."""
        result = StepResult()
        under_way, self._ahead = self._ahead, None
        covered, rest = _matched(entries, under_way)
        plain = [entry for entry in rest if _is_plain(entry)]
        launched = [] if under_way is None or not covered else [under_way]
        if plain:
            launched += self._launch(plain, on_layer)
        following = [entry for entry in (*covered, *plain) if entry.samples and self._goes_on(entry)]
        if following and on_layer is None and self._nearly_finished(self._interrupted):
            self._ahead = self._launch_following(following)
        if len(plain) < len(rest):
            slow = [entry for entry in rest if not _is_plain(entry)]
            result = self._scoring.run(slow, on_layer)
        if plain and not launched:
            self._nearly_finished(lambda: False)
        wanted = {id(entry.sequence) for entry in (*covered, *plain)}
        for batch in launched:
            for sequence, token in zip(batch.sequences, batch.wait(), strict=True):
                if id(sequence) not in wanted:
                    continue
                if token >= 0:
                    result.sampled[sequence.request_id] = Sampled(token, None)
                else:
                    result.errors[sequence.request_id] = "the model's logits are not finite numbers"
        return result

    def _nearly_finished(self, interrupted: Callable[[], bool]) -> bool:
        """Waits until the device has little left to do; False if interrupted before."""
        while self._progress.count() < self._started:
            if interrupted():
                return False
            time.sleep(_POLL)
        return True

    def _launch(self, entries: list[Entry], on_layer: Callable[[int], None] | None) -> list[_Launched]:
        """Starts entries whose tokens the CPU knows. Nothing comes back of entries that do not sample."""
        token_ids = [token for entry in entries for token in entry.sequence.token_ids[entry.start : entry.end]]
        spans = [Span(entry.sequence.block_ids, entry.start, entry.num_tokens) for entry in entries]
        chosen = [i for i, entry in enumerate(entries) if entry.samples and entry.sequence.request.sampling.max_tokens]
        sequences, ends = [entries[i].sequence for i in chosen], [entries[i].end for i in chosen]
        if on_layer is None and len(chosen) == len(token_ids) <= self._graphs.largest:
            self._started += 1
            logits, best, rows = self._graphs.run(spans, token_ids)
            return [self._choose(sequences, ends, logits, best, rows)]
        if on_layer is None:
            self._started += 1
        context = self._attention.plan(spans, on_layer or self._progress.on_layer)
        tokens = torch.tensor(token_ids).pin_memory().to(self._attention.device, non_blocking=True)
        last = np.cumsum([entry.num_tokens for entry in entries])[chosen] - 1
        picked = torch.from_numpy(last).pin_memory().to(self._attention.device, non_blocking=True)
        hidden = self._model.forward(tokens, context.positions, context, picked)
        if not chosen:
            return []
        logits = self._model.logits(hidden)[:, : self._sampler.vocab_size]
        return [self._choose(sequences, ends, logits, best_tokens(logits), context.table_rows[picked].long())]

    def _goes_on(self, entry: Entry) -> bool:
        """Whether the sequence is sure to compute the token that this entry samples, unless that ends it."""
        sequence = entry.sequence
        room = min(len(sequence.block_ids) * sequence.block_size, self._max_model_len - 1)
        count = sequence.num_output_tokens + 1
        return entry.end < room and not sequence.hold and count < sequence.request.sampling.max_tokens

    def _launch_following(self, entries: list[Entry]) -> _Launched:
        """Starts the step after that of the entries, whose tokens are on the device."""
        spans = [Span(entry.sequence.block_ids, entry.end, 1) for entry in entries[: self._graphs.largest]]
        self._started += 1
        logits, best, rows = self._graphs.run(spans, None)
        sequences, ends = [entry.sequence for entry in entries], [entry.end + 1 for entry in entries]
        return self._choose(sequences[: len(spans)], ends[: len(spans)], logits, best, rows)

    def _choose(
        self,
        sequences: list[Sequence_],
        ends: list[int],
        logits: torch.Tensor,
        best: torch.Tensor,
        rows: torch.Tensor,
    ) -> _Launched:
        """Samples on the device, keeps the tokens there for the next step, and sends them to the CPU."""
        draws = [Draw(s.request.sampling, end - s.num_prompt_tokens) for s, end in zip(sequences, ends, strict=True)]
        tokens = draw_tokens(logits, best, draws)
        self._graphs.keep(rows, tokens)
        host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Launched(sequences, [s.block_ids for s in sequences], ends, host, arrived)


def _is_plain(entry: Entry) -> bool:
    """Whether the device can choose the entry's token without knowing earlier ones."""
    return is_plain(entry.sequence.request.sampling) and not wants_prompt_logprobs(entry)


def _matched(entries: Sequence[Entry], launched: _Launched | None) -> tuple[list[Entry], list[Entry]]:
    """(entries that were launched ahead, others)."""
    if launched is None:
        return [], list(entries)
    ahead = {
        id(sequence): (blocks, end)
        for sequence, blocks, end in zip(launched.sequences, launched.blocks, launched.ends, strict=True)
    }
    covered: list[Entry] = []
    rest: list[Entry] = []
    for entry in entries:
        blocks, end = ahead.get(id(entry.sequence), (None, 0))
        same = entry.num_tokens == 1 and entry.end == end and entry.sequence.block_ids is blocks
        (covered if same else rest).append(entry)
    return covered, rest
