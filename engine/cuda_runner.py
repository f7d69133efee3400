"""Runs steps on a CUDA device, one step ahead of the CPU.

The token that a sequence samples is the input of its next step, and it stays on the device for that. So the next step,
as the scheduler foresees it, starts before the CPU waits for the tokens of this one. When the scheduler then asks for
it, it is under way or done; what was computed for a sequence that has ended is dropped. Kernels of one stream run in
order, so blocks that changed hands meanwhile are written by their new owner last.

The next step is planned as late as can be, when the device tells that most of this one's layers are done: a prompt that
comes in before is part of it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Span
from engine.attention.paged import PagedBackend
from engine.kernels.signal import signal
from engine.runner import Model, OnLayers, Runner, StepResult, wants_prompt_logprobs
from engine.sampler import Draw, Sampled, Sampler, best_tokens, draw_tokens, is_plain
from engine.sequence import Sequence as Sequence_
from engine.step import Entry
from engine.step_graphs import StepGraphs

_POLL = 1e-4  # seconds
_SAMPLED = -1  # in place of a token that only the device knows yet
# Of a step's layers: the rest takes longer than starting the next step does.
_NEARLY = {"decodes": 0.75, "prompts": 0.9}


class DeviceProgress:
    """How many steps the device has nearly finished, of a model with so many layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._layers = {kind: int(part * num_layers) for kind, part in _NEARLY.items()}
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._view = self._seen.numpy()

    def on_layer(self, prompts: bool, layer: int) -> None:
        """To be called after each layer of each step that counts, with or without prompts."""
        if layer == self._layers["prompts" if prompts else "decodes"]:
            signal(self._counter, self._seen)

    def count(self) -> int:
        """Steps nearly finished."""
        return int(self._view[0])


@dataclass(slots=True)
class _Launched:
    """Entries under way on the device, and the tokens that some of them sample on their way to the CPU."""

    entries: list[Entry]
    sampling: list[Sequence_]
    tokens: torch.Tensor  # pinned int64 [len(sampling)]; -1 where logits were no numbers
    arrived: torch.cuda.Event

    def wait(self) -> list[int]:
        """The tokens."""
        self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def those_of(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those entries that are under way here."""
        mine = {entry.sequence: entry for entry in self.entries}
        return [
            entry
            for entry in entries
            if (own := mine.get(entry.sequence)) is not None and own == entry and own.blocks is entry.blocks
        ]


class CudaRunner:
    """One model and one cache on one device."""

    def __init__(
        self,
        model: Model,
        attention: PagedBackend,
        sampler: Sampler,
        graphs: StepGraphs,
        progress: DeviceProgress,
        num_layers: int,
    ) -> None:
        torch.cuda.synchronize()
        self._progress = progress
        self._started = progress.count()  # steps
        self._model = model
        self._num_layers = num_layers
        self._attention = attention
        self._sampler = sampler
        self._graphs = graphs
        # For what must come back to the CPU step by step.
        self._scoring = Runner(model, attention, sampler, str(attention.device))
        self._ahead: _Launched | None = None
        self._under_way: list[_Launched] = []  # all that the device may be computing

    def settle(self) -> None:
        """See `Runner.settle`: a step that was started ahead writes the KV of sequences that have ended since, too."""
        for batch in self._under_way:
            if not all(entry.stands for entry in batch.entries):
                batch.arrived.synchronize()

    @torch.inference_mode()
    def run(
        self,
        entries: Sequence[Entry],
        on_layers: OnLayers | None = None,
        foresee: Callable[[], Sequence[Entry]] = lambda: (),
        listen: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Computes the entries; see `Runner.run`.

        `on_layers` is called as soon as what computes the layers is on the device's current stream: with a graph for
        all layers at once, and for entries that are begun ahead, too.
        """
        under_way, self._ahead = self._ahead, None
        covered = [] if under_way is None else under_way.those_of(entries)
        known = {entry.sequence for entry in covered}
        rest = [entry for entry in entries if entry.sequence not in known]
        plain = [entry for entry in rest if _is_plain(entry)]
        launched = [under_way] if under_way is not None and covered else []
        if plain:
            launched.append(self._launch(plain, on_layers))
        if launched:
            self._wait_until_nearly_finished(listen)
            if following := [entry for entry in foresee() if _is_plain(entry)]:
                self._ahead = self._launch(following, on_layers)
        # Blocks of one that was aborted meanwhile may be another's, who is under way.
        slow = [entry for entry in rest if not _is_plain(entry) and entry.stands]
        result = self._score(slow, on_layers) if slow else StepResult()
        wanted = known.union(entry.sequence for entry in plain)
        for batch in launched:
            for sequence, token in zip(batch.sampling, batch.wait(), strict=True):
                if sequence not in wanted:
                    continue
                if token >= 0:
                    result.sampled[sequence.request_id] = Sampled(token, None)
                else:
                    result.errors[sequence.request_id] = "the model's logits are not finite numbers"
        self._under_way = [batch for batch in self._under_way if not batch.arrived.query()]  # type: ignore[no-untyped-call]
        return result

    def _wait_until_nearly_finished(self, listen: Callable[[], None]) -> None:
        """Until the device has little left to do. Raises what went wrong there."""
        stream = torch.cuda.current_stream()
        listen()
        while self._progress.count() < self._started and not stream.query():
            time.sleep(_POLL)
            listen()

    def _score(self, entries: list[Entry], on_layers: OnLayers | None) -> StepResult:
        """Computes what must come back step by step; of prompts that go on nothing does, and the device is not done."""
        try:
            return self._scoring.run(entries, on_layers)
        finally:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._under_way.append(_Launched(entries, [], torch.empty(0), arrived))

    def _launch(self, entries: list[Entry], on_layers: OnLayers | None) -> _Launched:
        """Starts the entries. If that fails, nothing of them is under way."""
        self._started += 1
        try:
            return self._start(entries, on_layers)
        except BaseException:
            torch.cuda.synchronize()
            self._started = self._progress.count()
            raise

    def _start(self, entries: list[Entry], on_layers: OnLayers | None) -> _Launched:
        """A token that the CPU does not know yet is the last one that its sequence has sampled."""
        token_ids = [
            token for entry in entries for token in entry.sequence.token_ids[entry.start : entry.end] or (_SAMPLED,)
        ]
        spans = [Span(entry.blocks, entry.start, entry.num_tokens) for entry in entries]
        chosen = [
            i
            for i, entry in enumerate(entries)
            if entry.end >= len(entry.sequence.token_ids) and entry.sequence.request.sampling.max_tokens
        ]
        last = np.cumsum([entry.num_tokens for entry in entries])[chosen] - 1
        if (shape := self._graphs.shape_of(spans, len(chosen))) is not None:
            logits, best, rows = self._graphs.run(shape, spans, token_ids, last.tolist())
            if on_layers is not None:
                on_layers(range(self._num_layers), entries)
            return self._choose(entries, chosen, logits, best, rows)

        def told(layer: int) -> None:
            self._progress.on_layer(True, layer)
            if on_layers is not None:
                on_layers(range(layer, layer + 1), entries)

        context = self._attention.plan(spans, told)
        sent = torch.from_numpy(np.concatenate((token_ids, last)).astype(np.int64)).pin_memory()
        tokens, picked = sent.to(self._attention.device, non_blocking=True).split_with_sizes(
            (len(token_ids), len(last))
        )
        if _SAMPLED in token_ids:
            tokens = self._graphs.known(tokens, context.table_rows)
        hidden = self._model.forward(tokens, context.positions, context, picked)
        logits = hidden.new_empty((0, 1))
        if chosen:
            logits = self._model.logits(hidden)[:, : self._sampler.vocab_size]
        return self._choose(entries, chosen, logits, best_tokens(logits), context.table_rows[picked].long())

    def _choose(
        self, entries: list[Entry], chosen: list[int], logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor
    ) -> _Launched:
        """Samples on the device, keeps the tokens there for the next step, and sends them to the CPU."""
        sampling = [entries[i].sequence for i in chosen]
        if sampling:
            draws = [
                Draw(s.request.sampling, entries[i].end - s.num_prompt_tokens)
                for i, s in zip(chosen, sampling, strict=True)
            ]
            best = draw_tokens(logits, best, draws)
            self._graphs.keep(rows, best)
        host = torch.empty(len(best), dtype=torch.int64, pin_memory=True)
        host.copy_(best, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        launched = _Launched(entries, sampling, host, arrived)
        self._under_way.append(launched)
        return launched


def _is_plain(entry: Entry) -> bool:
    """Whether the device can choose the entry's token without knowing earlier ones."""
    return is_plain(entry.sequence.request.sampling) and not wants_prompt_logprobs(entry)
