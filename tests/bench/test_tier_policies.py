"""The optimum that policies of tiers are compared with."""

import random

import numpy as np
import pytest

from bench.tier_policies import Optimum, Tier, replay
from kv_transfer.tiers.policies import POLICIES
from planner.simulator.demand import Demand, Trace
from planner.simulator.job import BLOCK_SIZE


def trace_of(prompts: list[str]) -> Trace:
    """A prompt of `n` blocks is a letter and a number: a2 is the first two blocks of a."""
    demands = [
        Demand(int(text[1:]) * BLOCK_SIZE + 1, 1, [f"{text[0]}{at}".encode() for at in range(int(text[1:]))])
        for text in prompts
    ]
    return Trace("made", demands, np.arange(len(demands), dtype=float))


def hits(prompts: list[str], policy: str, capacity: int) -> float:
    trace = trace_of(prompts)
    cache = Optimum(trace.demands, capacity) if policy == "optimum" else Tier(POLICIES[policy](capacity), capacity)
    return replay(trace, cache)["hit_rate"]


def test_the_optimum_gives_tails_up_before_heads() -> None:
    prompts = ["a2", "b1", "b1", "a2"]
    tokens = sum(int(text[1:]) * BLOCK_SIZE + 1 for text in prompts)
    assert hits(prompts, "optimum", 2) * tokens == pytest.approx(2 * BLOCK_SIZE)


def test_no_policy_beats_the_optimum() -> None:
    rng = random.Random(5)
    for _ in range(60):
        prompts = [f"{rng.choice('abcd')}{rng.randint(1, 3)}" for _ in range(rng.randint(4, 16))]
        capacity = rng.randint(1, 5)
        best = hits(prompts, "optimum", capacity)
        for policy in POLICIES:
            assert hits(prompts, policy, capacity) <= best + 1e-12, (policy, capacity, prompts)
