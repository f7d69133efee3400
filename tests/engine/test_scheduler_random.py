"""The scheduler under random requests, aborts and handoffs: tokens are exact and nothing leaks."""

import contextlib

from fake_engine import BLOCK, EOS, FakeEngine, ask, reference
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.request import Request
from engine.scheduler import NothingToFetch
from engine.sequence import State


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, aborts, handoffs that land or fail, at random: tokens are exact and nothing leaks."""

    @initialize(
        num_blocks=st.integers(4, 20),
        max_batched_tokens=st.sampled_from([2, 5, 16, 32]),
        max_running=st.integers(2, 6),
        max_model_len=st.sampled_from([20, 10_000]),
        max_overtaking=st.sampled_from([0, 1, 4]),
        max_mixed_prefill_tokens=st.sampled_from([1, 3, 10_000]),
        foresees=st.booleans(),
        swaps=st.booleans(),
    )
    def start(self, swaps: bool, **sizes: int) -> None:
        self.engine = FakeEngine(**sizes)
        self.engine.scheduler.rather_fetch = lambda tokens: swaps
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.detached: list[list[int]] = []
        self.prefixes: dict[str, int] = {}  # reserved for the leading blocks only, as many as a peer will bring

    # Beginnings are often shared, ends rarely.
    prompts = st.builds(
        lambda start, end: [0] * start + end, st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=4)
    )

    def draw(self, prompt: list[int], max_tokens: int, priority: int, eos: bool, scores: bool) -> Request:
        request = ask(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            eos_token_ids=(EOS,) if eos else (),
            min_tokens=min(2, max_tokens),
            prompt_logprobs=0 if scores else None,
        )
        return request

    @rule(prompt=prompts, max_tokens=st.integers(0, 24), priority=st.integers(0, 2), eos=st.booleans(),
          scores=st.sampled_from([False] * 4 + [True]), hold=st.sampled_from([False] * 4 + [True]))  # fmt: skip
    def add(self, prompt: list[int], max_tokens: int, priority: int, eos: bool, scores: bool, hold: bool) -> None:
        request = self.draw(prompt, max_tokens, priority, eos, scores)
        self.requests[request.request_id] = request
        self.engine.add(request, hold=hold)

    @rule(prompt=prompts, max_tokens=st.integers(1, 24), priority=st.integers(0, 2), eos=st.booleans())
    def reserve(self, prompt: list[int], max_tokens: int, priority: int, eos: bool) -> None:
        request = self.draw(prompt, max_tokens, priority, eos, False)
        if self.engine.scheduler.reserve(self.engine.sequence(request)):
            self.requests[request.request_id] = request

    @rule(prompt=prompts, max_tokens=st.integers(1, 24), priority=st.integers(0, 2), tokens=st.integers(1, 16),
          held=st.integers(1, 4), hold=st.booleans())  # fmt: skip
    def reserve_prefix(
        self, prompt: list[int], max_tokens: int, priority: int, tokens: int, held: int, hold: bool
    ) -> None:
        request = self.draw(prompt, max_tokens, priority, False, False)
        sequence = self.engine.sequence(request, hold=hold)
        with contextlib.suppress(NothingToFetch):
            if not self.engine.scheduler.reserve(sequence, tokens):
                return
            self.requests[request.request_id] = request
            landing = min(sequence.num_published + held, len(sequence.block_ids))
            self.prefixes[request.request_id] = landing

    @rule(prompt=prompts)
    def hold_cached(self, prompt: list[int]) -> None:
        request = self.draw(prompt, 1, 0, False, False)
        if self.engine.scheduler.hold_cached(self.engine.sequence(request)):
            self.requests[request.request_id] = request
            self.aborted.add(request.request_id)  # nobody waits for its tokens

    def commit(self, name: str) -> None:
        sequence = self.engine.scheduler.sequences[name]
        if sequence.preempted:  # its own blocks come back, or some of them
            self.engine.commit_prefix(name, max(sequence.num_published + 1, len(sequence.block_ids) - 1))
        elif name in self.prefixes:
            self.engine.commit_prefix(name, self.prefixes[name])
        else:
            self.engine.commit(name)

    def pick(self, data: st.DataObject, *states: State) -> str | None:
        names = sorted(name for name, s in self.engine.scheduler.sequences.items() if s.state in states)
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: len(self.requests) > 4 * len(self.aborted))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if name := self.pick(data, *State):
            self.engine.scheduler.abort(name)
            self.aborted.add(name)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if name := self.pick(data, State.RESERVED):
            self.commit(name)

    @rule(data=st.data())
    def transfer_fails(self, data: st.DataObject) -> None:
        if name := self.pick(data, State.RESERVED):
            self.engine.scheduler.recompute(name)

    @rule(data=st.data(), then_wait=st.booleans())
    def writer_is_lost(self, data: st.DataObject, then_wait: bool) -> None:
        if name := self.pick(data, State.RESERVED):
            sequence = self.engine.scheduler.sequences[name]
            expected = sequence.block_ids[sequence.num_published :]
            generations = [self.engine.pool.generation(block) for block in expected]
            blocks = self.engine.scheduler.detach(name, then_wait=then_wait)
            assert blocks == expected and [self.engine.pool.generation(b) for b in blocks] == generations
            self.detached.append(blocks)
            if not then_wait:
                self.aborted.add(name)

    @precondition(lambda self: self.detached)
    @rule()
    def writer_is_fenced(self) -> None:
        self.engine.pool.release(self.detached.pop(0))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if name := self.pick(data, State.HELD):
            self.engine.scheduler.release(name)
            self.aborted.add(name)  # its further tokens are computed elsewhere

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(data=st.data(), calls=st.lists(st.sampled_from(["abort", "land", "transfer_fails", "release"]), max_size=3),
          prompt=prompts, adds=st.booleans())  # fmt: skip
    def step_with_calls(self, data: st.DataObject, calls: list[str], prompt: list[int], adds: bool) -> None:
        """Calls come while a step is under way, before the next one is foreseen."""

        def listen() -> None:
            for call in calls:
                getattr(self, call)(data)
            if adds:
                self.add(prompt, 3, 1, False, False, False)

        self.engine.listen = listen
        self.engine.step()
        self.engine.listen = lambda: None

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.pool.check()
        sequences = engine.scheduler.sequences.values()
        references = [0] * engine.num_blocks
        for blocks in [*(s.block_ids for s in sequences), *self.detached]:
            assert len(set(blocks)) == len(blocks)
            for block in blocks:
                references[block] += 1
        assert references == engine.pool._references
        assert all((s.state is State.WAITING) <= (not s.block_ids) for s in sequences)
        busy = sum(s.state in (State.RUNNING, State.RESERVED) for s in sequences)
        assert busy <= engine.max_running

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for blocks in self.detached:
            engine.pool.release(blocks)
        self.detached = []
        while engine.scheduler.sequences:
            for name, sequence in list(engine.scheduler.sequences.items()):
                if sequence.state is State.RESERVED:
                    self.commit(name)
                elif sequence.state is State.HELD:
                    engine.scheduler.release(name)
                    self.aborted.add(name)
            engine.run()
        engine.run()
        engine.assert_idle()
        for name, request in self.requests.items():
            expected, reason = reference(request, engine.max_model_len)
            output = engine.outputs.get(name, [])
            assert output == expected[: len(output)]
            if name in self.aborted:
                continue
            sequence = engine.ended[name]
            if output == expected and sequence.finish_reason == reason:
                continue
            # Only a sequence that the whole pool cannot hold ends early.
            assert sequence.finish_reason == ("length" if output else "error")
            assert len(sequence.token_ids) > engine.num_blocks * BLOCK


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
