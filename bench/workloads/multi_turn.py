"""Chats whose history grows: each request sends all that was said before."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from bench.config import WorkloadConfig
from bench.workloads.base import Conversation, Synthetic, Turn, Words
from bench.workloads.lengths import parse_length, parse_seconds

_STREAM = 0x3C4A  # keeps these draws apart from others with the same seed
_MOST_TURNS = 10_000


def multi_turn(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """Endless chats with one system prompt of `prefix_len` tokens (none if 0) and `turns` questions of `input_len`.

    Before each question but the first, the user thinks for `think` seconds. Raises BenchError.
    """
    inputs, outputs = parse_length(config.input_len), parse_length(config.output_len)
    turns = parse_length(config.turns, _MOST_TURNS)
    think = parse_seconds(config.think)
    rng = np.random.default_rng((seed, _STREAM))
    system = (Synthetic((seed, _STREAM, 0), config.prefix_len),) if config.prefix_len else ()
    for number in count():
        yield Conversation(
            system=system,
            turns=[
                Turn(
                    text=(Synthetic((seed, _STREAM, 1, number, turn), inputs.sample(rng)),),
                    output_tokens=outputs.sample(rng),
                    think=think.sample(rng) / 1e3 if turn else 0.0,
                )
                for turn in range(turns.sample(rng))
            ],
        )
