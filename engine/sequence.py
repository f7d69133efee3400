"""A request on its way through the engine: its tokens, its blocks and its state."""

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from engine.hashing import block_hashes
from engine.request import FinishReason, Request, TokenLogprob, TokenOutput


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds nothing
    RESERVED = "reserved"  # holds blocks into which a peer writes the KV of the prompt
    RUNNING = "running"
    HELD = "held"  # blocks are pinned until a peer has them: of a computed prompt with its first token, or cached ones
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's view of one request."""

    request: Request
    arrival: int
    block_size: int
    root: bytes  # parent hash of the first block
    hold: bool = False  # go to HELD after the first sampled token
    state: State = State.WAITING
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, extended on demand
    num_published: int = 0  # leading blocks that can be found by hash
    num_cached_tokens: int | None = None  # prefix hit at first admission
    num_fetched_tokens: int = 0  # those of them that a peer had
    fetched_from_tier: bool = False  # that peer was the KV service
    preempted: bool = False  # it gave its blocks back, and has not gone on since
    elsewhere_blocks: int = 0  # leading blocks that the KV service may have, to be fetched when its turn comes
    found_blocks: int = 0  # leading blocks that were cached when last looked for, while WAITING
    begun_at: float = 0.0  # when its first prompt tokens became part of a step, time.monotonic()
    overtaken_tokens: int = 0  # of prompts with a weaker claim, computed while this one had to wait
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        """Output tokens of an earlier attempt are computed like a prompt."""
        self.token_ids = self.request.prompt_token_ids + self.request.output_token_ids
        self.hashes = list(self.request.block_hashes)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cacheable_blocks(self) -> int:
        """Leading blocks that may be taken from the cache.

        The last token is always computed, since its logits are needed, and a shared block is never written: the block
        of the last token is never taken. None is where the prompt's own logits are wanted.
        """
        scored = self.request.sampling.prompt_logprobs is not None
        return 0 if scored else (len(self.token_ids) - 1) // self.block_size

    @property
    def claim(self) -> tuple[int, int]:
        """Sort key of its claim to be served: smaller is better."""
        return (self.request.priority, self.arrival)

    def full_hashes(self, num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks."""
        if len(self.hashes) < num_blocks:
            done = len(self.hashes)
            tokens = self.token_ids[done * self.block_size : num_blocks * self.block_size]
            self.hashes += block_hashes(tokens, self.block_size, self.hashes[-1] if self.hashes else self.root)
        return self.hashes[:num_blocks]

    def so_far(self) -> Request:
        """The request with all tokens that are there of its answer."""
        return msgspec.structs.replace(self.request, output_token_ids=self.token_ids[self.num_prompt_tokens :])

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the sequence; blocks are the scheduler's to free."""
        self.state = State.FINISHED
        self.finish_reason = reason
        self.error = error

    def output(self, token_id: int | None = None, logprob: TokenLogprob | None = None) -> TokenOutput:
        """What goes out when `token_id` was just appended, or nothing."""
        token_ids = [] if token_id is None else [token_id]
        return TokenOutput(
            request_id=self.request_id,
            attempt=self.request.attempt,
            index=self.num_output_tokens - len(token_ids),
            token_ids=token_ids,
            logprobs=None if logprob is None else [logprob],
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
            cached_tokens=self.num_cached_tokens or 0,
            error=self.error,
        )
