"""A request on a mock worker: what `engine.sequence.Sequence` is to the engine, without the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sequence import State

BLOCK_SIZE = 512  # tokens: what one hash id of a Mooncake trace stands for; of a simulation, if it says nothing else


@dataclass(slots=True, eq=False)
class Job:
    """One request on one worker. `hashes`: of the full blocks of prompt and answer together."""

    arrival: int
    prompt_tokens: int
    output_tokens: int
    hashes: list[bytes]
    hold: bool = False  # only the prompt is computed here; its blocks are held until they are elsewhere
    state: State = State.WAITING
    num_output_tokens: int = 0  # as of when the job last joined or left the decodes
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found when it was first admitted
    num_fetched_tokens: int = 0  # from other workers, or from the KV service
    restored: dict[str, int] = field(default_factory=dict)  # tokens of them, by tier of the KV service
    found_blocks: int = 0
    overtaken_tokens: int = 0
    joined_at: int = 0  # the worker's count of steps when it joined the decodes
    claim: tuple[int, int] = field(init=False)
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        """All have one priority."""
        self.claim = (0, self.arrival)

    @property
    def token_ids(self) -> range:
        """As many as the sequence has now."""
        return range(self.prompt_tokens + self.num_output_tokens)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the answer so far."""
        return self.prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing."""
        return self.prompt_tokens + self.num_output_tokens - self.num_computed_tokens

    @property
    def num_cacheable_blocks(self) -> int:
        """Leading blocks that may be taken from the cache: never that of the last token."""
        return (self.prompt_tokens + self.num_output_tokens - 1) // self.block_size

    def full_hashes(self, num_blocks: int) -> Sequence[bytes]:
        """Hashes of the first `num_blocks` full blocks, and perhaps of more."""
        return self.hashes
