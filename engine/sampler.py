"""Chooses the next token of every row of a batch.

Each row is independent of its neighbours: every operation works along the vocabulary, and randomness is one uniform
number keyed by (seed, position in the output). So a request gives the same tokens in any batch, after preemption and on
another worker. All state is rebuilt from the row's token ids.

Order: logit bias and min_tokens, penalties, then greedy, or temperature, top-k, top-p, min-p and the draw. Log
probabilities are of the raw logits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.request import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-5  # temperatures under it would overflow the logits, and choose the best token anyhow
_NEGLIGIBLE = 80.0  # logits so far below the best are never drawn: their exponentials are next to denormal
_NEAR = 8.0  # top-p looks at logits so near to the best before it sorts all


class SamplerRow(NamedTuple):
    """What decides one row besides its logits."""

    params: SamplingParams
    token_ids: Sequence[int]  # prompt and output so far
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        """Position in the output of the token to choose."""
        return len(self.token_ids) - self.num_prompt_tokens


class Draw(NamedTuple):
    """What decides a row in which no earlier token matters."""

    params: SamplingParams
    position: int  # in the output, of the token to choose


class Sampled(NamedTuple):
    """The chosen token of a row."""

    token_id: int
    logprob: TokenLogprob | None


class Sampler:
    """Samples ids below `vocab_size` only: models pad their vocabulary beyond what the tokenizer knows."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """logits [M, vocabulary or more], any float dtype, may be changed; one `Sampled` for each of the M rows."""
        logits = logits[:, : self.vocab_size].float()
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        logprobs = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
        for i, row in enumerate(rows):
            _shape(logits[i], row)
        tokens = _best(logits)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW]
        if drawn:
            draws = [Draw(rows[i].params, rows[i].num_output_tokens) for i in drawn]
            for i, token in zip(drawn, _draw(logits[drawn], draws).tolist(), strict=True):
                tokens[i] = token
        entries: list[TokenLogprob | None] = [None] * len(rows)
        if logprobs is not None:
            counts = [rows[i].params.logprobs or 0 for i in wanted]
            for i, entry in zip(wanted, top_logprobs(logprobs, [tokens[i] for i in wanted], counts), strict=True):
                entries[i] = entry
        return [Sampled(token, entry) for token, entry in zip(tokens, entries, strict=True)]

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
        """Log probability under logits [M, vocabulary or more] of one given token a row, and of the `count` best."""
        logprobs = torch.log_softmax(logits[:, : self.vocab_size].float(), dim=-1)
        return top_logprobs(logprobs, token_ids, [count] * len(token_ids))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Greedy choice int64 [M] of logits [M, V]; -1 where NaN or infinity is the best."""
    best, tokens = logits.max(dim=-1)  # NaN anywhere in a row makes its maximum NaN
    return torch.where(torch.isfinite(best), tokens, -1)


def draw_tokens(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens int64 [M] of plain rows, without leaving the device; -1 where `best` is.

    Greedy rows take `best` int64 [M], others are drawn from logits [M, V].
    """
    drawn = [i for i, draw in enumerate(draws) if draw.params.temperature >= _GREEDY_BELOW]
    if not drawn:
        return best
    index = torch.tensor(drawn, device=best.device)
    tokens = best.clone()
    tokens[index] = _draw(logits[index].float(), [draws[i] for i in drawn])
    return torch.where(best < 0, best, tokens)


def is_plain(params: SamplingParams) -> bool:
    """Whether neither earlier tokens nor biases decide, and nothing but the token is wanted."""
    return (
        params.logprobs is None
        and not params.logit_bias
        and not params.min_tokens
        and params.repetition_penalty == 1.0
        and not params.frequency_penalty
        and not params.presence_penalty
    )


def top_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Of logprobs [M, V]: the given token's entry of each row, and the `counts[m]` best ones, best first."""
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = torch.topk(logprobs, min(max(counts), logprobs.shape[1]), dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, top[:count])
        for token, logprob, top, count in zip(token_ids, chosen, tops, counts, strict=True)
    ]


def _best(logits: torch.Tensor) -> list[int]:
    """Of logits [M, V] the index of each row's greatest, the first of equals. On CPU NumPy is ten times faster."""
    best: list[int] = (
        logits.numpy().argmax(axis=-1).tolist() if logits.device.type == "cpu" else logits.argmax(dim=-1).tolist()
    )
    return best


def _shape(logits: torch.Tensor, row: SamplerRow) -> None:
    """Applies bias, min_tokens and penalties to one row [V] in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
    if row.num_output_tokens < params.min_tokens and (ends := params.stop_token_ids + params.eos_token_ids):
        logits[[token for token in ends if token < len(logits)]] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids, device=logits.device)
        values = logits[seen]  # a token seen twice is written twice with the same value
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and row.num_output_tokens:
        used, times = np.unique(row.token_ids[row.num_prompt_tokens :], return_counts=True)
        penalties = params.frequency_penalty * times + params.presence_penalty
        logits[torch.from_numpy(used).to(logits.device)] -= torch.from_numpy(penalties).float().to(logits.device)


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Samples int64 [M] from logits [M, V], which it overwrites.

    Inverts the cumulative distribution in order of token id.
    """
    device = logits.device
    logits.div_(torch.tensor([draw.params.temperature for draw in draws], device=device).unsqueeze(1))
    best = logits.amax(dim=-1, keepdim=True)
    if device.type == "cpu":
        least = torch.tensor([_least(logits[i].numpy(), draw.params) for i, draw in enumerate(draws)]).unsqueeze(1)
    else:
        least = _least_by_sorting(logits, best, [draw.params for draw in draws])
    logits.masked_fill_(logits < least, -torch.inf)
    cumulative = logits.sub_(best).exp_().cumsum(dim=-1, dtype=torch.float64)
    drawn = [uniform(draw.params.seed, draw.position) for draw in draws]
    uniforms = torch.tensor(drawn, dtype=torch.float64, device=device)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first entry beyond the target exists and has a probability above zero.
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _least(logits: npt.NDArray[np.float32], params: SamplingParams) -> float:
    """The least of logits [V] that survives top-k, then top-p, then min-p. Equal logits survive together."""
    best = float(logits.max())
    least = best - _NEGLIGIBLE
    if 0 < params.top_k < len(logits):
        values = np.sort(np.partition(logits, -params.top_k)[-params.top_k :])[::-1]
        if params.top_p < 1.0:
            values = values[: _nucleus(values - best, params.top_p)]
        least = max(least, float(values[-1]))
    elif params.top_p < 1.0:
        total = np.exp(logits - best).sum(dtype=np.float64)
        for margin in (_NEAR, _NEGLIGIBLE):
            values = np.sort(logits[logits >= best - margin])[::-1]
            count = _nucleus(values - best, params.top_p, total)
            if count <= len(values):
                least = float(values[count - 1])
                break
    if params.min_p > 0.0:
        least = max(least, best + math.log(params.min_p))
    return least


def _least_by_sorting(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The same [M, 1] for many rows at once, without leaving the device of logits [M, V]; best [M, 1]."""
    device, size = logits.device, logits.shape[1]
    margins = [max(-_NEGLIGIBLE, math.log(p.min_p) if p.min_p > 0 else -math.inf) for p in params]
    least = best + torch.tensor(margins, device=device).unsqueeze(1)
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < size or p.top_p < 1.0]
    if cut:
        values = logits[cut].sort(dim=-1, descending=True).values
        counts = torch.tensor([params[i].top_k if 0 < params[i].top_k < size else size for i in cut], device=device)
        kth = values.gather(1, counts.unsqueeze(1) - 1)
        mass = (values - values[:, :1]).double().exp().masked_fill_(values < kth, 0.0).cumsum(dim=-1)
        share = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64, device=device).unsqueeze(1)
        last = torch.searchsorted(mass, share * mass[:, -1:]).clamp_(max=size - 1)
        least[cut] = torch.maximum(least[cut], torch.maximum(kth, values.gather(1, last)))
    return least


def _nucleus(values: npt.NDArray[np.float32], top_p: float, total: float | None = None) -> int:
    """How many of the log weights `values`, best first, hold `top_p` of `total`, or else of their own sum."""
    mass = np.exp(values, dtype=np.float64).cumsum()
    return int(np.searchsorted(mass, top_p * (mass[-1] if total is None else total))) + 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments, on any machine."""
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53
