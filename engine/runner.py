"""Turns a scheduled step into tensors, runs the model and samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionContext, Span
from engine.request import TokenLogprob
from engine.sampler import Sampled, Sampler, SamplerRow
from engine.sequence import Sequence as Sequence_
from engine.step import Entry

if TYPE_CHECKING:
    from engine.step_graphs import StepGraphs

_SCORED_ROWS = 256  # prompt rows whose logits are held at once

OnLayers = Callable[[range, Sequence[Entry]], None]


class Model(Protocol):
    """What a model family offers the runner."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids and positions int64 [N] -> hidden states [N, hidden], or those of `rows` int64 [M]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [M, hidden] -> logits [M, vocabulary]."""
        ...


class Computation(NamedTuple):
    """What the runner of a device has steps computed by."""

    model: Model
    attention: AttentionBackend
    graphs: "StepGraphs | None"


@dataclass(slots=True)
class StepResult:
    """What the model said in one step, by request id."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)  # of tokens start + 1 and on
    errors: dict[str, str] = field(default_factory=dict)  # requests whose logits are no numbers


class Runner:
    """Runs steps on one model and one cache."""

    def __init__(self, model: Model, attention: AttentionBackend, sampler: Sampler, device: str = "cpu") -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self._device = device

    def settle(self) -> None:
        """Returns when nothing is written any more for sequences that have ended. Here no step goes on behind `run`."""

    @torch.inference_mode()
    def run(
        self,
        entries: Sequence[Entry],
        on_layers: OnLayers | None = None,
        foresee: Callable[[], Sequence[Entry]] = lambda: (),
        listen: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Computes the entries. `on_layers(layers, entries)` is called when their KV of these layers is in the cache.

        Runners that begin the next step before this one's tokens are known get its entries of `foresee()`, and call
        `listen()` again and again while they wait.
        """
        spans = [Span(entry.blocks, entry.start, entry.num_tokens) for entry in entries]
        token_ids = [token for entry in entries for token in entry.sequence.token_ids[entry.start : entry.end]]
        positions = np.concatenate([np.arange(entry.start, entry.end) for entry in entries])
        context = self.attention.plan(spans, on_layers and (lambda layer: on_layers(range(layer, layer + 1), entries)))
        tokens, places = torch.tensor(token_ids).to(self._device), torch.from_numpy(positions).to(self._device)
        chosen = [i for i, entry in enumerate(entries) if entry.samples and entry.sequence.request.sampling.max_tokens]
        ends = np.cumsum([entry.num_tokens for entry in entries])
        last = torch.from_numpy(ends[chosen] - 1).to(self._device)

        result = StepResult()
        if any(map(wants_prompt_logprobs, entries)):
            hidden = self.model.forward(tokens, places, context)
            for entry, end in zip(entries, ends.tolist(), strict=True):
                if wants_prompt_logprobs(entry):
                    self._score_prompt(entry, hidden[end - entry.num_tokens : end], result)
            hidden = hidden[last]
        else:
            hidden = self.model.forward(tokens, places, context, last)
        if chosen:
            self._sample([entries[i].sequence for i in chosen], hidden, result)
        return result

    def _sample(self, sequences: Sequence[Sequence_], hidden: torch.Tensor, result: StepResult) -> None:
        """Chooses the sequences' next tokens by their hidden states [M, hidden]."""
        logits = self.model.logits(hidden)
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # NaN anywhere in a row makes its maximum NaN
        rows = [SamplerRow(s.request.sampling, s.token_ids, s.num_prompt_tokens) for s in sequences]
        for sequence, sampled, ok in zip(sequences, self.sampler.sample(logits, rows), finite, strict=True):
            if ok:
                result.sampled[sequence.request_id] = sampled
            else:
                result.errors[sequence.request_id] = "the model's logits are not finite numbers"

    def _score_prompt(self, entry: Entry, hidden: torch.Tensor, result: StepResult) -> None:
        """Log probabilities of the prompt tokens that the entry's hidden states [n, hidden] predict."""
        sequence = entry.sequence
        targets = sequence.request.prompt_token_ids[entry.start + 1 : entry.end + 1]
        scores: list[TokenLogprob] = []
        for i in range(0, len(targets), _SCORED_ROWS):
            part = targets[i : i + _SCORED_ROWS]
            logits = self.model.logits(hidden[i : i + len(part)])
            scores += self.sampler.score(logits, part, sequence.request.sampling.prompt_logprobs or 0)
        result.prompt_logprobs[sequence.request_id] = scores


def wants_prompt_logprobs(entry: Entry) -> bool:
    """Whether the entry computes prompt tokens whose log probabilities nobody has been given yet."""
    sequence = entry.sequence
    return sequence.request.sampling.prompt_logprobs is not None and sequence.num_output_tokens == 0
