"""The sampler against plain definitions, row by row, and the independence of rows."""

import math
from collections import Counter

import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import Sampler, SamplerRow, uniform

VOCAB = 1000


def logits_of(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def row(prompt=(1, 2, 3), output=(), **params):
    return SamplerRow(SamplingParams(**params), [*prompt, *output], len(prompt))


def draws(logits, count=400, **params):
    """Tokens drawn from one row of logits at positions 0, 1, ..."""
    rows = [row(output=[0] * position, **params) for position in range(count)]
    return [s.token_id for s in Sampler(VOCAB).sample(logits.repeat(count, 1), rows)]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 40, "seed": 2},
    {"temperature": 1.3, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": -0.5, "seed": 5, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 9, "eos_token_ids": (5,), "stop_token_ids": (6,), "seed": 6, "logprobs": 5},
]


def test_rows_are_independent_of_company_and_order():
    rows = [row(output=[4, 4, 8][: i % 4], **params) for i, params in enumerate(MIXED * 3)]
    logits = logits_of(len(rows))
    sampler = Sampler(VOCAB)
    together = sampler.sample(logits.clone(), rows)
    alone = [sampler.sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(len(rows))]
    assert together == alone  # log probabilities bit for bit, too
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sampler.sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_seed_and_position_decide_and_nothing_else():
    logits = logits_of(1)
    assert draws(logits, seed=1) == draws(logits, seed=1)
    assert draws(logits, seed=1) != draws(logits, seed=2)
    assert len(set(draws(logits, seed=1))) > 5  # positions differ
    assert [uniform(0, 0), uniform(7, 3)] == pytest.approx([0.011546754, 0.482128602], abs=1e-9)
    assert all(0 <= uniform(seed, position) < 1 for seed in range(50) for position in range(50))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [10, 500, 999]] = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]) / temperature, 0)
    counts = Counter(draws(logits, 2000, temperature=temperature, seed=11))
    for token, probability in zip([10, 500, 999], expected.tolist(), strict=True):
        assert counts[token] / 2000 == pytest.approx(probability, abs=0.04)


def survivors(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Tokens that may be drawn, by sorting everything."""
    values, ids = logits.double().sort(descending=True)
    keep = len(values) if top_k == 0 else top_k
    probabilities = torch.softmax(values[:keep], 0)
    before = probabilities.cumsum(0) - probabilities
    kept = (before < top_p) & (probabilities >= min_p * probabilities[0])
    return set(ids[:keep][kept].tolist())


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])  # flat to peaked
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 5000},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"top_k": 30, "top_p": 0.6, "min_p": 0.05},
    ],
)
def test_filters_leave_what_they_should(filters, scale):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * scale
    expected = survivors(logits[0], **{**filters, "top_k": min(filters.get("top_k", 0), VOCAB)})
    drawn = set(draws(logits, 600, temperature=1.0, seed=5, **filters))
    assert drawn <= expected
    if len(expected) <= 30:
        probability = torch.softmax(logits[0][list(expected)], 0)
        assert len(drawn) >= int((probability > 0.03).sum())


def test_temperature_near_zero_is_greedy_and_leaves_no_overflow():
    logits = logits_of(1)
    assert set(draws(logits, 5, temperature=1e-9)) == {int(logits.argmax())}
    assert set(draws(logits, 50, temperature=1e-4)) == {int(logits.argmax())}
    assert all(0 <= token < VOCAB for token in draws(logits, 50, temperature=1e9))


def greedy(logits, **kwargs):
    return Sampler(VOCAB).sample(logits.clone(), [row(temperature=0.0, **kwargs)])[0].token_id


def test_penalties_count_what_they_should():
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 11, 12]] = torch.tensor([3.0, 2.9, 2.0])
    assert greedy(logits) == 10
    assert greedy(logits, prompt=(10,), repetition_penalty=1.5) == 11  # the prompt counts
    assert greedy(logits, prompt=(10, 10), output=(11, 10), repetition_penalty=1.5) == 10  # 2.0 = 3 / 1.5 comes first
    assert greedy(logits, prompt=(10,), presence_penalty=1.0) == 10  # the prompt does not count
    assert greedy(logits, output=(10,), presence_penalty=0.5) == 11
    assert greedy(logits, output=(10, 10, 10, 11), frequency_penalty=0.4) == 11  # 3 - 1.2 against 2.9 - 0.4
    assert greedy(logits, output=(10, 11), presence_penalty=2.0) == 12
    negative = torch.full((1, VOCAB), -9.0)
    negative[0, [10, 11]] = torch.tensor([-1.0, -1.2])
    assert greedy(negative, output=(10,), repetition_penalty=1.5) == 11  # negative logits are multiplied


def test_bias_and_minimum_length():
    logits = logits_of(1)
    best, second = logits[0].topk(2).indices.tolist()
    assert greedy(logits, logit_bias={second: 50.0}) == second
    assert greedy(logits, logit_bias={best: -100.0}) == second
    assert greedy(logits, min_tokens=2, eos_token_ids=(best,), output=(1,)) == second
    assert greedy(logits, min_tokens=2, stop_token_ids=(best, VOCAB + 5), output=(1,)) == second
    assert greedy(logits, min_tokens=2, eos_token_ids=(best,), output=(1, 1)) == best


def test_padded_vocabulary_is_never_chosen():
    logits = logits_of(2, vocab=VOCAB + 24)
    logits[:, VOCAB:] = 100.0
    sampled = Sampler(VOCAB).sample(logits, [row(temperature=0.0, logprobs=5), row(temperature=1.0, logprobs=5)])
    for one in sampled:
        assert one.token_id < VOCAB and all(token < VOCAB for token, _ in one.logprob.top)


def test_logprobs_are_of_the_raw_distribution():
    logits = logits_of(1)
    expected = torch.log_softmax(logits[0].double(), 0)
    params = {"temperature": 0.3, "top_k": 1, "logit_bias": {17: 100.0}, "repetition_penalty": 1.9}
    sampled = Sampler(VOCAB).sample(logits.clone(), [row(logprobs=4, **params)])[0]
    assert sampled.token_id == sampled.logprob.token_id == 17
    assert sampled.logprob.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in sampled.logprob.top] == best.indices.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert Sampler(VOCAB).sample(logits.clone(), [row(logprobs=0)])[0].logprob.top == []
    assert Sampler(VOCAB).sample(logits.clone(), [row()])[0].logprob is None


def test_score_gives_logprobs_of_given_tokens():
    logits = logits_of(3, vocab=VOCAB + 8)
    scores = Sampler(VOCAB).score(logits, [5, 6, 7], 2)
    expected = torch.log_softmax(logits[:, :VOCAB].double(), -1)
    for i, score in enumerate(scores):
        assert score.token_id == 5 + i and len(score.top) == 2
        assert math.isclose(score.logprob, float(expected[i, 5 + i]), abs_tol=1e-5)
