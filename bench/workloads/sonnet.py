"""Lines of poems: natural text of an exact length."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Literal, Turn, Words
from bench.workloads.lengths import parse_length

_STREAM = 0x50E7  # keeps these draws apart from others with the same seed
_LINES_KEPT = 1 << 16


def sonnet(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """Endless single requests: lines of `config.data` in random order, cut to `input_len` tokens. Raises BenchError."""
    try:
        lines = [line.strip() for line in Path(config.data).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the poems in {config.data}: {error}") from error
    if not lines:
        raise BenchError(f"{config.data} has no lines")
    inputs, outputs = parse_length(config.input_len), parse_length(config.output_len)
    count = lru_cache(_LINES_KEPT)(words.count)
    rng = np.random.default_rng((seed, _STREAM))
    order: list[int] = []
    while True:
        tokens = inputs.sample(rng)
        chosen: list[str] = []
        missing = tokens  # each line adds at least its own tokens; what is too much is cut off at the end
        while missing > 0:
            order = order or rng.permutation(len(lines)).tolist()
            chosen.append(lines[order.pop()])
            missing -= max(1, count(chosen[-1]))
        text = Literal("\n".join(chosen), tokens)
        yield Conversation(turns=[Turn(text=(text,), output_tokens=outputs.sample(rng))])
