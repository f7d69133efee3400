"""Groups of prompts that begin with one prefix, as system prompts and documents make them."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Synthetic, Turn, Words
from bench.workloads.lengths import parse_length

_STREAM = 0x5BA2  # keeps these draws apart from others with the same seed


def shared_prefix(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """Endless single requests: `prefix_len` tokens of one of `groups` groups, then `input_len` of its own.

    Raises BenchError.
    """
    if config.groups < 1 or config.prefix_len < 1:
        raise BenchError("shared-prefix needs --groups and --prefix-len of at least 1")
    inputs, outputs = parse_length(config.input_len), parse_length(config.output_len)
    rng = np.random.default_rng((seed, _STREAM))
    seen: set[int] = set()
    for number in count():
        group = int(rng.integers(config.groups))
        prefix = Synthetic((seed, _STREAM, 0, group), config.prefix_len)
        tail = Synthetic((seed, _STREAM, 1, number), inputs.sample(rng))
        shared = config.prefix_len if group in seen else 0
        seen.add(group)
        turn = Turn(text=(prefix, tail), output_tokens=outputs.sample(rng), shared_tokens=shared)
        yield Conversation(turns=[turn])
