"""Prompts of random words that share nothing."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from bench.config import WorkloadConfig
from bench.workloads.base import Conversation, Synthetic, Turn, Words
from bench.workloads.lengths import parse_length

_STREAM = 0x4A9D  # keeps these draws apart from others with the same seed


def random(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """Endless single requests of `input_len` and `output_len` tokens. Raises BenchError."""
    inputs, outputs = parse_length(config.input_len), parse_length(config.output_len)
    rng = np.random.default_rng((seed, _STREAM))
    for number in count():
        text = (Synthetic((seed, _STREAM, number), inputs.sample(rng)),)
        yield Conversation(turns=[Turn(text=text, output_tokens=outputs.sample(rng), shared_tokens=0)])
