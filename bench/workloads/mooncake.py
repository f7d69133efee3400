"""Mooncake traces: JSON lines of timestamp, lengths and the hash ids of the prompt's blocks.

Equal leading ids are equal leading tokens, so the text of a block depends on nothing but its id and the seed.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Synthetic, Turn, Words
from bench.workloads.length_traces import scale_tokens
from bench.workloads.trace_time import schedule

BLOCK = 512  # tokens of the trace that one hash id stands for
_UNNAMED = 0x7A11_0000_0001  # opens the seeds of tokens that no hash id names

_MOST = 2**31  # no model reads that many tokens: such a length is a mistake
_HashId = Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One line. `timestamp` in milliseconds, lengths in tokens, a hash id for each block of 512 tokens begun."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, lt=_MOST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, lt=_MOST)]
    hash_ids: tuple[_HashId, ...]


class EndlessCache:
    """A prefix cache that forgets nothing and knows prompts to the token: what is the most that can be reused."""

    def __init__(self) -> None:
        # (node of the block before, hash id) -> (node, most tokens of the block that were seen)
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}

    def admit(self, blocks: Iterable[tuple[int, int]]) -> int:
        """Adds a prompt of blocks (hash id, tokens); returns how many of its leading tokens were there already.

        No block but the last may be shorter than others of its id, so nothing is known behind a block known in part.
        """
        shared, node = 0, 0
        for hash_id, tokens in blocks:
            child, known = self._seen.get((node, hash_id), (len(self._seen) + 1, 0))
            shared += min(known, tokens)
            self._seen[node, hash_id] = child, max(known, tokens)
            node = child
        return shared


def mooncake(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """One request a line of `config.data`, at its time. Raises BenchError.

    A block becomes `512 * length_scale` tokens, a last one that is not full the same share of them. Where a line
    has more ids than its input length has blocks the rest of them is dropped; where it has fewer, the tokens beyond
    are text that no other request has. `shared_tokens` counts tokens of the prompt's text, not those that a
    tokenizer or a chat template puts in front of it, and takes the replay's first request as the cache's first.
    """
    requests = read_mooncake(Path(config.data))
    block = scale_tokens(BLOCK, config.length_scale)
    timestamps = np.array([request.timestamp for request in requests]) / 1e3
    rows, starts = schedule(timestamps, config, seed)
    return _replay(requests, rows.tolist(), starts.tolist(), config, block, seed)


def _replay(
    requests: list[TraceRequest], rows: list[int], starts: list[float], config: WorkloadConfig, block: int, seed: int
) -> Iterator[Conversation]:
    cache = EndlessCache()
    for row, start in zip(rows, starts, strict=True):
        request = requests[row]
        sizes = block_sizes(request.input_length, block)
        blocks = list(zip(request.hash_ids, sizes, strict=False))
        text = [Synthetic((seed, hash_id), tokens) for hash_id, tokens in blocks]
        if unnamed := sum(sizes[len(blocks) :]):
            text.append(Synthetic((seed, _UNNAMED, row), unnamed))
        turn = Turn(
            text=text,
            output_tokens=scale_tokens(request.output_length, config.length_scale),
            shared_tokens=cache.admit(blocks),
        )
        yield Conversation(turns=[turn], at=start)


def block_sizes(input_length: int, block: int) -> list[int]:
    """Tokens of each block of a prompt, when 512 tokens of the trace become `block`."""
    full, rest = divmod(input_length, BLOCK)
    sizes = [block] * full
    if rest:
        sizes.append(-(-rest * block // BLOCK))  # rounded up: a block that was begun has at least one token
    return sizes


def read_mooncake(path: Path) -> list[TraceRequest]:
    """The requests of a file in its order. Raises BenchError with file and line for what is no request."""
    decode = msgspec.json.Decoder(TraceRequest).decode
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    requests.append(decode(line))
                except msgspec.MsgspecError as error:
                    raise BenchError(
                        f"{path}:{number}: {error}. A line of a Mooncake trace is "
                        '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}'
                    ) from None
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    if not requests:
        raise BenchError(f"{path} holds no request")
    return requests
