"""A scheduler with a runner that only hashes tokens: what comes out must not depend on how it was scheduled."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.hashing import root_hash
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.step import Entry, Step

BLOCK = 4
EOS = 7
ROOT = root_hash(fingerprint="test", layout="test", block_size=BLOCK)


def next_token(token_ids: list[int]) -> int:
    """The token that the fake model samples: depends on every token before it."""
    return hashlib.sha256(repr(token_ids).encode()).digest()[0] % 32


def reference(request: Request, max_model_len: int = 10_000) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that nobody schedules."""
    tokens, output = list(request.prompt_token_ids), []
    sampling = request.sampling
    while sampling.max_tokens:
        # An end token before min_tokens is masked by the sampler: the fake takes the next id instead.
        output.append(sample(tokens, len(output), sampling))
        tokens.append(output[-1])
        if len(output) > sampling.min_tokens and output[-1] in sampling.eos_token_ids + sampling.stop_token_ids:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            break
    return output, "length"


def sample(token_ids: list[int], num_output: int, sampling: SamplingParams) -> int:
    token = next_token(token_ids)
    masked = sampling.eos_token_ids + sampling.stop_token_ids if num_output < sampling.min_tokens else ()
    while token in masked:
        token += 1
    return token


@dataclass
class FakeEngine:
    """A scheduler, and a KV memory of which each slot holds the whole token prefix that was computed into it.

    Computing a token checks that every slot before it holds exactly this sequence's prefix, so a wrong, stale or shared
    and overwritten block is seen at once.
    """

    num_blocks: int = 16
    max_batched_tokens: int = 16
    max_running: int = 8
    max_model_len: int = 10_000
    max_overtaking: int = 4
    max_mixed_prefill_tokens: int = 10_000
    # Computes the next step, as the scheduler foresees it, before it tells the tokens of this one.
    foresees: bool = False
    listen: Callable[[], None] = lambda: None  # what calls come while a step is under way
    arrivals: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Sequence] = field(default_factory=dict)
    computed: int = 0  # tokens, over all steps
    kept: int = 0  # entries that were foreseen

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size=BLOCK,
            max_batched_tokens=self.max_batched_tokens,
            max_mixed_prefill_tokens=self.max_mixed_prefill_tokens,
            max_running=self.max_running,
            max_overtaking=self.max_overtaking,
            max_model_len=self.max_model_len,
        )
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ahead: list[tuple[Entry, list[int]]] = []
        self.admitted_ahead: set[Sequence] = set()  # prompts, however few tokens they lack

    def sequence(self, request: Request, *, hold: bool = False, root: bytes = ROOT) -> Sequence:
        self.arrivals += 1
        return Sequence(request, self.arrivals, BLOCK, root, hold)

    def add(self, request: Request, *, hold: bool = False, root: bytes = ROOT) -> Sequence:
        sequence = self.sequence(request, hold=hold, root=root)
        self.scheduler.add(sequence)
        return sequence

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // BLOCK], position % BLOCK

    def land(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """A peer writes the KV of all tokens, or the first ones, into a reserved sequence's own blocks."""
        for position in range(sequence.num_published * BLOCK, num_tokens or len(sequence.token_ids)):
            self.memory[self.slot(sequence, position)] = tuple(sequence.token_ids[: position + 1])

    def commit_prefix(self, request_id: str, num_blocks: int) -> None:
        sequence = self.scheduler.sequences[request_id]
        self.land(sequence, num_blocks * BLOCK)
        assert self.scheduler.commit_prefix(request_id, num_blocks) is sequence

    def commit(self, request_id: str) -> None:
        sequence = self.scheduler.sequences[request_id]
        self.land(sequence)
        token = sample(sequence.token_ids, sequence.num_output_tokens, sequence.request.sampling)
        assert self.scheduler.commit(request_id, token) is sequence
        self._took(sequence, token)

    def step(self, now: float = 0.0) -> Step:
        running = [s for s in self.scheduler.sequences.values() if s.state is State.RUNNING]
        decoding = {s for s in running if s.num_uncomputed_tokens == 1} - self.admitted_ahead
        step = self.scheduler.schedule(now)
        assert step.num_tokens <= self.max_batched_tokens
        chunks = [entry.num_tokens for entry in step.entries if entry.sequence not in decoding]
        assert len(chunks) == len(step.entries) or sum(chunks) <= self.max_mixed_prefill_tokens
        assert len({id(entry.sequence) for entry in step.entries}) == len(step.entries)
        sampled = {}
        for entry in step.entries:
            sequence = entry.sequence
            assert sequence.state is State.RUNNING and entry.num_tokens > 0
            if any(entry == own and sequence.block_ids is blocks for own, blocks in self.ahead):
                self.kept += 1
            else:
                self._compute(entry, sequence.token_ids)
        for entry in step.entries:
            sequence = entry.sequence
            for position in range(entry.end):
                assert self.memory[self.slot(sequence, position)] == tuple(sequence.token_ids[: position + 1])
            sampling = sequence.request.sampling
            if entry.samples and sampling.max_tokens:
                sampled[sequence.request_id] = sample(sequence.token_ids, sequence.num_output_tokens, sampling)
        self.ahead = []
        self.listen()
        if self.foresees:
            running = [s for s in self.scheduler.sequences.values() if s.state is State.RUNNING]
            foreseen = self.scheduler.foresee(step)
            self.admitted_ahead = {entry.sequence for entry in foreseen}.difference(running)
            assert sum(entry.num_tokens for entry in foreseen) <= self.max_batched_tokens
            assert len({id(entry.sequence) for entry in foreseen}) == len(foreseen)
            for entry in foreseen:
                assert entry.sequence.state is State.RUNNING and entry.num_tokens > 0
                self._compute(entry, [*entry.sequence.token_ids, sampled.get(entry.sequence.request_id, -1)])
            self.ahead = [(entry, entry.sequence.block_ids) for entry in foreseen]
        for sequence in self.scheduler.complete(step, sampled):
            self._took(sequence, sampled.get(sequence.request_id))
        for sequence in step.ended:
            self._took(sequence, None)
        return step

    def _compute(self, entry: Entry, token_ids: list[int]) -> None:
        for position in range(entry.start, entry.end):
            slot = self.slot(entry.sequence, position)
            assert self.pool._hash_of[slot[0]] is None, "a block that others may find is written"
            self.memory[slot] = tuple(token_ids[: position + 1])
        self.computed += entry.num_tokens

    def _took(self, sequence: Sequence, token: int | None) -> None:
        assert sequence.request_id not in self.ended, "told twice that it ended"
        if token is not None:
            self.outputs.setdefault(sequence.request_id, []).append(token)
        if sequence.state is State.FINISHED:
            assert not sequence.block_ids
            self.ended[sequence.request_id] = sequence

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.has_work(now=0.0):
            limit -= 1
            assert limit > 0, "the scheduler never comes to an end"
            self.step()
            self.pool.check()

    def assert_idle(self) -> None:
        assert not self.scheduler.sequences and not self.scheduler.has_work()
        assert self.pool.num_free == self.num_blocks
        self.pool.check()

    def assert_exact(self, request: Request) -> None:
        expected, reason = reference(request, self.max_model_len)
        assert self.outputs.get(request.request_id, []) == expected
        assert self.ended[request.request_id].finish_reason == reason


def ask(name: str, prompt: list[int], max_tokens: int = 8, **more: object) -> Request:
    sampling = {key: more.pop(key) for key in list(more) if key in SamplingParams.__struct_fields__}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **more,
    )
