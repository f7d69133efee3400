"""In which order prompts are computed: the shortest first, but nobody gives way for long.

A short prompt behind a long one waits many times its own length; the other way round the wait hardly shows. So among
prompts of one priority the one with the fewest tokens left to compute goes first, whether it waits or is computed in
chunks already. To be overtaken by later ones makes a prompt count as shorter: with n tokens left, overtaken by m, its
rank is `max_overtaking * n - m`, and not below 0, where all go by arrival. Hence a prompt of n tokens is overtaken by
at most `max_overtaking * n` tokens and one step more, however many short ones arrive. With 0 all go by arrival.

A sequence whose client has tokens already (it was preempted, or its worker died) stands at rank 0: a stream that
stalls is worse than one that starts late.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Protocol, TypeVar

from engine.block_pool import BlockPool
from engine.sequence import State

WINDOW = 128  # waiting prompts that compete, best claims first: to rank thousands would take as long as a step


class Prompt(Protocol):
    """What the order looks at: `engine.sequence.Sequence`, or what stands for one in a simulation."""

    overtaken_tokens: int
    found_blocks: int

    @property
    def state(self) -> State: ...  # noqa: D102

    @property
    def claim(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def token_ids(self) -> Sized: ...  # noqa: D102

    @property
    def block_size(self) -> int: ...  # noqa: D102

    @property
    def num_output_tokens(self) -> int: ...  # noqa: D102

    @property
    def num_uncomputed_tokens(self) -> int: ...  # noqa: D102

    @property
    def num_cacheable_blocks(self) -> int: ...  # noqa: D102

    def full_hashes(self, num_blocks: int) -> Sequence[bytes]: ...  # noqa: D102


P = TypeVar("P", bound=Prompt)


class PromptOrder:
    """The order, and the books of who was overtaken. Pure: time plays no part."""

    def __init__(self, pool: BlockPool, max_overtaking: int) -> None:
        self._pool = pool
        self._max_overtaking = max_overtaking

    def sort(self, prompts: Iterable[P]) -> list[P]:
        """The prompts, next one first."""
        return sorted(prompts, key=lambda s: (s.claim[0], self._rank(s), s.claim[1]))

    def book(self, prompts: Iterable[P], computed: Mapping[P, int]) -> None:
        """A step computes so many tokens of some of the prompts: those with a better claim and more to do wait."""
        tokens = 0
        for sequence in sorted(prompts, key=lambda s: s.claim, reverse=True):
            own = computed.get(sequence, 0)
            if own < sequence.num_uncomputed_tokens:
                sequence.overtaken_tokens += tokens
            tokens += own

    def _rank(self, sequence: Prompt) -> int:
        if sequence.num_output_tokens > 0:
            return 0
        return max(0, self._max_overtaking * self._tokens_left(sequence) - sequence.overtaken_tokens)

    def _tokens_left(self, sequence: Prompt) -> int:
        if sequence.state is not State.WAITING:
            return sequence.num_uncomputed_tokens
        # A guess, since admission looks for itself: only at where the cached prefix ended when last looked.
        found, most = sequence.found_blocks, sequence.num_cacheable_blocks
        hashes = sequence.full_hashes(most)
        while found < most and hashes[found] in self._pool:
            found += 1
        while found and hashes[found - 1] not in self._pool:
            found -= 1
        sequence.found_blocks = found
        return len(sequence.token_ids) - found * sequence.block_size
