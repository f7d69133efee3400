"""Decides what each step computes.

Prefill and decode are the same thing here: "compute the next n tokens of this sequence", until its computed tokens
catch up with its tokens; then one more is sampled. A step has one token budget. Decodes come first, one token each, so
that a long prompt stalls nobody. Prompts share what is left, in chunks, those that wait for admission and those under
way alike; `engine.prompt_order` says who is next. When blocks run out, the running sequence with the weakest claim
(priority, then arrival) gives its blocks back. Later it is computed again, or what it had is fetched (`rather_fetch`).
"""

import bisect
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from engine.block_pool import BlockPool
from engine.prompt_order import WINDOW, PromptOrder
from engine.request import FinishReason
from engine.sequence import Sequence, State
from engine.step import Entry, Step


class NothingToFetch(ValueError):
    """All that could be brought of a prefix is cached here."""


class Scheduler:
    """Continuous batching over one block pool.

    `max_mixed_prefill_tokens`: prompt tokens that a step with decodes may hold, so that these go on at their pace.
    `rather_fetch(tokens)` says, when the turn of a sequence has come that the KV service may have, whether so many of
    its tokens had better be fetched than computed; if so it is reserved, and `Step.fetches` asks for them.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_batched_tokens: int,
        max_mixed_prefill_tokens: int,
        max_running: int,
        max_model_len: int,
        max_overtaking: int,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.sequences: dict[str, Sequence] = {}  # all that have not ended
        self._waiting: list[Sequence] = []  # best claim first
        self._running: list[Sequence] = []
        self._ended: list[Sequence] = []  # ended outside of complete(); told with the next step
        self._order = PromptOrder(pool, max_overtaking)
        self.rather_fetch: Callable[[int], bool] = lambda tokens: False
        self._to_fetch: list[Sequence] = []  # reserved since the last step
        self._preempted: Counter[str] = Counter()  # what came of preempted sequences, since the last step
        self._foreseen: list[Entry] = []  # of the next step
        self._stalled_at = -1  # free blocks when the last step found nothing to compute: it takes more to go on

    @property
    def num_running(self) -> int:
        """Sequences that are computed step by step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, and those that wait for a peer's KV."""
        return len(self._waiting) + self._num_in_state(State.RESERVED)

    def has_work(self, now: float | None = None) -> bool:
        """Whether a step would do something. False while all depends on blocks that peers hold."""
        if self._ended or self._to_fetch:
            return True
        if not (self._running or self._waiting):
            return False
        if self.pool.num_free > self._stalled_at:
            return True
        now = time.monotonic() if now is None else now
        return any(s.request.deadline < now for s in (*self._running, *self._waiting))

    # Life of a sequence

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in; it waits for its turn."""
        self.sequences[sequence.request_id] = sequence
        self._wait(sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence at any state and frees its blocks; None if it is not known.

        A reserved sequence whose blocks a peer may still write is detached instead.
        """
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")
        return sequence

    def fail(self, sequence: Sequence, error: str) -> None:
        """Ends a sequence whose step failed."""
        self._end(sequence, "error", error)

    # Handoff: the decode side

    def reserve(self, sequence: Sequence, prefix_tokens: int | None = None) -> bool:
        """Takes blocks for all tokens of a new sequence, shared ones for its cached prefix; a peer will fill the rest.

        With `prefix_tokens` only those that so many leading tokens fill; raises NothingToFetch if all are cached here.
        False when there is no room now, in any case for all tokens. One block per running sequence stays free, so that
        they can go on, and so does what prompts with a better claim need: a stream of reservations starves nobody.
        """
        if len(self._running) + self._num_in_state(State.RESERVED) >= self.max_running:
            return False
        cached, needed = self._match(sequence, len(sequence.token_ids))
        owed = self._owed(sequence, [*self._waiting, *self._prompts_under_way({})])
        if self._free_besides(sequence, cached) < needed + len(self._running) + owed:
            return False
        if prefix_tokens is not None:
            needed = min(prefix_tokens // self.block_size, sequence.num_cacheable_blocks) - cached
            if needed < 1:
                raise NothingToFetch(f"nothing is missing behind {cached * self.block_size} cached tokens")
        self._reserve(sequence, cached, needed)
        self.sequences[sequence.request_id] = sequence
        return True

    def commit(self, request_id: str, first_token: int) -> Sequence | None:
        """The KV of all tokens has landed and the first new token is known: the sequence joins the batch.

        The caller emits the token; the sequence may end with it. None if it is not reserved (any more).
        """
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.state is not State.RESERVED:
            return None
        self.pool.unmark_transfer(sequence.block_ids)
        sequence.num_computed_tokens = len(sequence.token_ids)
        self._publish(sequence)
        self._run(sequence)
        self._append(sequence, first_token)
        return sequence

    def commit_prefix(self, request_id: str, num_blocks: int, *, from_tier: bool = False) -> Sequence | None:
        """The KV of so many leading blocks of a reserved sequence has landed: the sequence joins the batch as a prompt.

        None if it is not reserved (any more). `from_tier`: the KV service had them.
        """
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.state is not State.RESERVED:
            return None
        self.pool.unmark_transfer(sequence.block_ids)
        sequence.num_computed_tokens = num_blocks * self.block_size
        if sequence.preempted:
            self._goes_on_after(sequence, "swapped")
        else:
            cached = sequence.num_cached_tokens or 0
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            sequence.num_fetched_tokens = sequence.num_cached_tokens - cached
            sequence.fetched_from_tier = from_tier
        self._publish(sequence)
        self._run(sequence)
        return sequence

    def recompute(self, request_id: str) -> Sequence | None:
        """The transfer failed and nobody writes into the blocks any more: the prompt is computed here."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.state is not State.RESERVED:
            return None
        self._free(sequence)
        self._wait(sequence)
        return sequence

    def detach(self, request_id: str, *, then_wait: bool) -> list[int]:
        """Takes from a reserved sequence the blocks that a peer may still write; the caller releases them later.

        The sequence waits to be computed here, or ends if not `then_wait`.
        """
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.state is not State.RESERVED:
            return []
        own = sequence.block_ids[sequence.num_published :]
        self.pool.release(sequence.block_ids[: sequence.num_published])
        sequence.block_ids = []
        sequence.num_published = sequence.num_computed_tokens = 0
        if then_wait:
            self._wait(sequence)
        else:
            self._end(sequence, "abort")
        return own

    # Handoff: the side that sends

    def hold_cached(self, sequence: Sequence) -> int:
        """Holds what is cached of the full blocks of a new sequence, until `release`. Returns how many tokens.

        Where that is none, nothing is held and the sequence is not taken in.
        """
        cached = self.pool.match(sequence.full_hashes(len(sequence.token_ids) // self.block_size))
        if cached:
            self._take(sequence, cached, 0)
            sequence.state = State.HELD
            self.sequences[sequence.request_id] = sequence
        return cached * self.block_size

    def release(self, request_id: str, *, copied: bool = False) -> None:
        """Ends a held sequence: its blocks are wherever they had to go. `copied`: see `BlockPool.release`."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.state is State.HELD:
            self._free(sequence, copied=copied)
            self._end(sequence, "stop")
            self._ended.remove(sequence)

    # The step

    def schedule(self, now: float | None = None) -> Step:
        """The next step. Takes blocks for it; preempts where they do not suffice."""
        now = time.monotonic() if now is None else now
        for sequence in list(self.sequences.values()):
            if sequence.request.deadline < now and sequence.state in (State.WAITING, State.RUNNING):
                self._end(sequence, "error", "deadline exceeded")
        entries, self._foreseen = [entry for entry in self._foreseen if _still_holds(entry)], []
        if entries:
            budget = self.max_batched_tokens - sum(entry.num_tokens for entry in entries)
            chunks = sum(entry.num_tokens for entry in entries if entry.sequence.num_uncomputed_tokens > 1)
            if chunks <= self.max_mixed_prefill_tokens:
                entries = self._decodes({entry.sequence for entry in entries}, budget) + entries
        else:
            entries = self._decodes((), self.max_batched_tokens)
            entries += self._chunks(self._prompt_budget(entries), {})
        entries = [entry for entry in entries if entry.stands]  # not preempted for one that comes after it
        fetches = [sequence.so_far() for sequence in self._to_fetch if sequence.state is State.RESERVED]
        step = Step(entries, self._ended, fetches, self._preempted)
        self._ended, self._to_fetch, self._preempted = [], [], Counter()
        self._stalled_at = -1 if entries or step.ended else self.pool.num_free
        return step

    def foresee(self, step: Step) -> list[Entry]:
        """The entries of the step after `step`, before the tokens that it samples are known; none if blocks are scarce.

        As if these tokens ended no sequence: the next entry of one begins where its known tokens end. Prompts are
        admitted. The next call of `schedule` keeps to what was foreseen and still holds.
        """
        if self.pool.num_free < self._blocks_for(self.max_batched_tokens) + 2 * len(self._running):
            return []  # somebody may have to give way, which is better decided when it comes to it
        after = {entry.sequence: entry.end for entry in step.entries}
        entries: list[Entry | None] = []
        for sequence in sorted(self._running, key=lambda s: s.claim):
            start = after.get(sequence, sequence.num_computed_tokens)
            missing = len(sequence.token_ids) - start
            if missing == 1 or (missing == 0 and self._goes_on(sequence)):
                entries.append(self._continue(sequence, start, 1))
        decodes = [entry for entry in entries[: self.max_batched_tokens] if entry is not None]
        chunks = self._chunks(self._prompt_budget(decodes), after)
        self._foreseen = [entry for entry in decodes + chunks if entry.stands]
        return self._foreseen

    def complete(self, step: Step, sampled: dict[str, int]) -> list[Sequence]:
        """Books a computed step and appends sampled tokens. Returns the sequences that got a token or ended.

        Entries that stand no more count for nothing: a call that came during the step ended their sequence, or the
        next step was foreseen to take its blocks.
        """
        changed = []
        for entry in step.entries:
            sequence = entry.sequence
            if not entry.stands:
                continue
            sequence.num_computed_tokens = entry.end
            self._publish(sequence)
            if (token := sampled.get(sequence.request_id)) is not None:
                changed.append(sequence)
                self._append(sequence, token)
            elif entry.samples:
                changed.append(sequence)  # max_tokens is 0: only the prompt was wanted
                self._end_running(sequence, "length")
        return changed

    # Inside

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        bisect.insort(self._waiting, sequence, key=lambda s: s.claim)
        self._stalled_at = -1

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self._running.append(sequence)
        self._stalled_at = -1

    def _prompts_under_way(self, after: Mapping[Sequence, int]) -> list[Sequence]:
        return [s for s in self._running if len(s.token_ids) - after.get(s, s.num_computed_tokens) > 1]

    def _prompt_budget(self, decodes: list[Entry]) -> int:
        """Prompt tokens that a step with these decodes may hold."""
        budget = self.max_batched_tokens - len(decodes)
        return min(budget, self.max_mixed_prefill_tokens) if decodes else budget

    def _decodes(self, besides: Collection[Sequence], budget: int) -> list[Entry]:
        """The next token of each other sequence that lacks but one, best claim first, `budget` at most."""
        lacking = [s for s in self._running if s.num_uncomputed_tokens == 1 and s not in besides]
        decodes = sorted(lacking, key=lambda s: s.claim)[:budget]
        entries = (self._continue(sequence, sequence.num_computed_tokens, 1) for sequence in decodes)
        return [entry for entry in entries if entry is not None]

    def _chunks(self, budget: int, after: Mapping[Sequence, int]) -> list[Entry]:
        """Prompt tokens, `budget` at most. The first prompt for which there is no room closes admission.

        `after`: where sequences stand once a step is booked that is under way.
        """
        entries: list[Entry] = []
        prompts = [*self._waiting[:WINDOW], *self._prompts_under_way(after)]
        room = self.max_running - self._num_in_state(State.RESERVED)
        for sequence in self._order.sort(prompts):
            if budget < 1:
                break
            entry = None
            if sequence.state is State.RUNNING:
                start = after.get(sequence, sequence.num_computed_tokens)
                entry = self._continue(sequence, start, min(len(sequence.token_ids) - start, budget))
            elif len(self._running) < room and (entry := self._admit(sequence, budget)) is None:
                room = room - 1 if sequence.state is State.RESERVED else 0
            if entry is not None:
                sequence.begun_at = sequence.begun_at or time.monotonic()
                entries.append(entry)
                budget -= entry.num_tokens
        self._order.book(prompts, {entry.sequence: entry.num_tokens for entry in entries})
        return entries

    def _continue(self, sequence: Sequence, start: int, count: int) -> Entry | None:
        """Tokens of a running sequence; None if there is no room, or it was preempted for another."""
        goes_on = sequence.state is State.RUNNING and self._grow(sequence, start + count)
        return Entry(sequence, start, count) if goes_on else None

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether the sequence is sure to compute the token that it samples now, unless that is an end token."""
        count = sequence.num_output_tokens + 1
        long = count >= sequence.request.sampling.max_tokens or len(sequence.token_ids) + 1 >= self.max_model_len
        return not sequence.hold and not long

    def _admit(self, sequence: Sequence, budget: int) -> Entry | None:
        """Moves a waiting sequence into the batch; None if there is no room for its first chunk.

        Or for all its tokens, if it has some fetched: then it is reserved, which is None, too.
        """
        cached, needed = self._match(sequence, len(sequence.token_ids))
        start = cached * self.block_size
        count = min(len(sequence.token_ids) - start, budget)
        fetched = self._better_fetched(sequence, cached)
        if not fetched:
            needed = self._blocks_for(start + count) - cached
        spare = self._free_besides(sequence, cached) - len(self._running)
        if spare < needed + self._owed(sequence, self._prompts_under_way({})):
            if not self._running and not self._others_hold_blocks(sequence):
                self._end_too_long(sequence)  # alone and still no room: it never fits
            return None
        self._waiting.remove(sequence)
        sequence.elsewhere_blocks = 0  # once is enough
        if fetched:
            self._reserve(sequence, cached, fetched)
            self._to_fetch.append(sequence)
            return None
        self._take(sequence, cached, needed)
        sequence.num_computed_tokens = start
        if sequence.preempted:
            self._goes_on_after(sequence, "recomputed")
        self._run(sequence)
        return Entry(sequence, start, count)

    def _better_fetched(self, sequence: Sequence, cached: int) -> int:
        """How many blocks behind its cached ones a waiting sequence had better have fetched."""
        missing = min(sequence.elsewhere_blocks, sequence.num_cacheable_blocks) - cached
        return missing if missing > 0 and self.rather_fetch(missing * self.block_size) else 0

    def _goes_on_after(self, sequence: Sequence, outcome: str) -> None:
        sequence.preempted = False
        self._preempted[outcome] += 1

    def _owed(self, sequence: Sequence, prompts: list[Sequence]) -> int:
        """Blocks that those of the prompts whose claim is better than the sequence's lack for all their tokens."""
        better = [prompt for prompt in prompts if prompt.claim < sequence.claim]
        return sum(self._blocks_for(len(prompt.token_ids)) - len(prompt.block_ids) for prompt in better)

    def _num_in_state(self, state: State) -> int:
        return sum(sequence.state is state for sequence in self.sequences.values())

    def _others_hold_blocks(self, sequence: Sequence) -> bool:
        """Whether more blocks may come: of other sequences, or detached ones that a peer may still write."""
        return self.pool.num_free + len(sequence.block_ids) < self.pool.num_blocks

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a running sequence blocks for `num_tokens`; preempts weaker claims. False: it sits this step out."""
        needed = self._blocks_for(num_tokens) - len(sequence.block_ids)
        while needed > self.pool.num_free:
            weakest = max(self._running, key=lambda s: s.claim)
            if weakest is not sequence:
                self._preempt(weakest)
            elif len(self._running) > 1:
                self._preempt(sequence)
                return False
            else:
                if not self._others_hold_blocks(sequence):
                    self._end_too_long(sequence)
                return False  # peers give blocks back; until then it keeps what it has
        if needed > 0:
            sequence.block_ids += self.pool.allocate(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preempted = True
        sequence.elsewhere_blocks = max(sequence.elsewhere_blocks, sequence.num_published)
        self._running.remove(sequence)
        self._free(sequence)
        self._wait(sequence)

    def _end_too_long(self, sequence: Sequence) -> None:
        if sequence.num_output_tokens > len(sequence.request.output_token_ids):
            self._end(sequence, "length")
        else:
            capacity = self.pool.num_blocks * self.block_size
            self._end(
                sequence, "error", f"{len(sequence.token_ids)} tokens do not fit the KV pool of {capacity} tokens"
            )

    def _match(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """(cached leading blocks, further blocks needed) for a sequence without blocks."""
        cached = self.pool.match(sequence.full_hashes(sequence.num_cacheable_blocks))
        return cached, self._blocks_for(num_tokens) - cached

    def _free_besides(self, sequence: Sequence, cached: int) -> int:
        """Free blocks that would be left after the cached prefix is taken."""
        return self.pool.num_free - self.pool.num_idle(sequence.hashes[:cached])

    def _reserve(self, sequence: Sequence, cached: int, needed: int) -> None:
        self._take(sequence, cached, needed)
        sequence.state = State.RESERVED
        self.pool.mark_transfer(sequence.block_ids[cached:])

    def _take(self, sequence: Sequence, cached: int, needed: int) -> None:
        sequence.block_ids = self.pool.acquire(sequence.hashes[:cached]) + self.pool.allocate(needed)
        sequence.num_published = cached
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(cached * self.block_size, sequence.num_prompt_tokens)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed_tokens // self.block_size
        if full > sequence.num_published:
            hashes = sequence.full_hashes(full)
            start = sequence.num_published
            root = b"" if sequence.request.block_hashes else sequence.root  # by hashes alone the salt is not known
            parent = hashes[start - 1] if start else root
            blocks = sequence.block_ids[start:full]
            self.pool.publish(blocks, hashes[start:], position=start, parent=parent, root=root)
            sequence.num_published = full

    def _append(self, sequence: Sequence, token: int) -> None:
        """Appends a sampled token to a running sequence and applies the rules that end it."""
        sequence.token_ids.append(token)
        sampling = sequence.request.sampling
        count = sequence.num_output_tokens
        if sequence.hold:
            self._running.remove(sequence)
            sequence.state = State.HELD
        elif count > sampling.min_tokens and (token in sampling.stop_token_ids or token in sampling.eos_token_ids):
            sequence.stop_token_id = token
            self._end_running(sequence, "stop")
        elif count >= sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len:
            self._end_running(sequence, "length")

    def _end_running(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in complete() or commit(), which tell it themselves."""
        self._end(sequence, reason)
        self._ended.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        if sequence.preempted:
            self._goes_on_after(sequence, "ended")
        self._free(sequence)
        sequence.finish(reason, error)
        self.sequences.pop(sequence.request_id, None)
        self._ended.append(sequence)

    def _free(self, sequence: Sequence, *, copied: bool = False) -> None:
        self.pool.release(sequence.block_ids, copied=copied)
        sequence.block_ids = []
        sequence.num_published = sequence.num_computed_tokens = 0


def _still_holds(entry: Entry) -> bool:
    """Whether a foreseen entry is what its sequence needs next."""
    sequence = entry.sequence
    at_start = sequence.num_computed_tokens == entry.start
    return entry.stands and at_start and entry.end <= len(sequence.token_ids)
