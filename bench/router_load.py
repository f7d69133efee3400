"""Prompts and caches for `bench.router_decision`: chains of random hashes, shared as those of real clusters are."""

import random
from collections.abc import Iterator

HASH_BYTES = 16
_PREFIX_BLOCKS = (16, 256)  # of a shared prefix: a system prompt, tools, a document
_LENGTHS = (10, 1000)  # blocks of a prompt
_COPIES = (1, 1, 1, 1, 2, 2, 3, 8)  # workers that hold a chain


def new_chain(rng: random.Random, blocks: int) -> list[bytes]:
    """Hashes of as many blocks that nobody has."""
    data = rng.randbytes(HASH_BYTES * blocks)
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


def prompt_blocks(rng: random.Random) -> int:
    """A length as in the Mooncake traces: lognormal, median about 110 blocks, cut to 10 to 1,000."""
    low, high = _LENGTHS
    return min(high, max(low, round(rng.lognormvariate(4.7, 1.0))))


class Population:
    """What a cluster has cached: `blocks` distinct blocks in chains that begin with one of few prefixes, or alone."""

    def __init__(self, rng: random.Random, blocks: int) -> None:
        self._rng = rng
        self.prefixes = [new_chain(rng, rng.randint(*_PREFIX_BLOCKS)) for _ in range(max(1, blocks // 20_000))]
        self.sessions: list[list[bytes]] = []
        left = blocks - sum(map(len, self.prefixes))
        while left > 0:
            own = new_chain(rng, min(left, prompt_blocks(rng)))
            left -= len(own)
            shared = rng.choice(self.prefixes) if rng.random() < 0.5 else []
            self.sessions.append((shared + own)[: _LENGTHS[1]])

    def held(self, workers: int) -> Iterator[tuple[int, list[bytes]]]:
        """(worker, chain) for each copy of each session."""
        for chain in self.sessions:
            for worker in self._rng.sample(range(workers), min(workers, self._rng.choice(_COPIES))):
                yield worker, chain

    def shared_prompt(self) -> list[bytes]:
        """A hot prefix, then blocks of its own."""
        return self._rng.choice(self.prefixes) + new_chain(self._rng, self._rng.randint(10, 100))

    def mooncake_prompt(self) -> list[bytes]:
        """A session goes on, or a new one begins: about half of the blocks are cached somewhere."""
        if self._rng.random() < 0.3:
            return new_chain(self._rng, prompt_blocks(self._rng))
        chain = self._rng.choice(self.sessions)
        return (chain + new_chain(self._rng, prompt_blocks(self._rng) // 2))[: _LENGTHS[1]]
