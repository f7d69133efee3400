"""All choices of one request under way: their sequences run at once, their deltas come together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from engine.text.tokenizer import Tokenizer
from services.api_keys import Tenant
from services.gateway.choice import Choice, Delta
from services.gateway.formats import Format, Head
from services.gateway.openai_types import PromptTokensDetails, Usage
from services.gateway.placement import Placements
from services.gateway.sequences import Sequence, SequenceSpec
from services.gateway.token_socket import TokenSocket
from services.gateway.validation import Options
from services.gateway.waterfall import Waterfall, Waterfalls, ordered
from services.rpc import cluster_pb2, router_pb2
from services.tracing import trace_id, traceparent


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request, tokenised. Prompt i's choice k has index i * n + k."""

    head: Head
    options: Options
    format: Format
    prompts: list[list[int]]
    eos_token_ids: tuple[int, ...]
    card: cluster_pb2.ModelCard
    room: int  # tokens that prompt and output may have together
    tenant: Tenant
    session: str
    cache_salt: str
    deadline: float  # time.monotonic()


class Running:
    """What sequences need of the process: placements, the token socket, and all of them by what they run on."""

    def __init__(self, placements: Placements, tokens: TokenSocket, incarnation: str) -> None:
        self.placements = placements
        self.tokens = tokens
        self.incarnation = incarnation
        self.sequences: set[Sequence] = set()
        self.waterfalls = Waterfalls()
        placements.on_lost(self._worker_lost)
        placements.on_joined(self._worker_joined)
        tokens.on_gap(self._tokens_lost)

    def _worker_lost(self, incarnation: str) -> None:
        for sequence in self._on(incarnation):
            sequence.lose("the worker is gone", exclude=True, outcome=router_pb2.LOST)

    def _worker_joined(self, incarnation: str) -> None:
        for sequence in self.sequences:
            sequence.joined(incarnation)

    def _tokens_lost(self, incarnation: str) -> None:
        """Whose they were is not known, and the last ones of a sequence would not be missed by it."""
        for sequence in self._on(incarnation):
            sequence.lose("tokens got lost on the way", exclude=False)

    def _on(self, incarnation: str) -> list[Sequence]:
        return [s for s in self.sequences if s.worker is not None and s.worker.incarnation == incarnation]

    def was_silent(self) -> None:
        """This gateway stood still for longer than its lease: workers may have aborted all that they had of it."""
        for sequence in list(self.sequences):
            sequence.lose("the gateway was silent for too long", exclude=False)


class Generation:
    """Runs a plan."""

    def __init__(self, plan: Plan, running: Running, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self._running = running
        self._dirty: dict[int, None] = {}  # indices with news, in order
        self._wake = asyncio.Event()
        self.choices: list[Choice] = []
        self._sequences: list[Sequence] = []
        options = plan.options
        for index in range(len(plan.prompts) * options.n):
            prompt = plan.prompts[index // options.n]
            self.choices.append(Choice(index, tokenizer, options, prompt if options.echo else None))
            spec = self._spec(index, prompt)
            self._sequences.append(Sequence(spec, running.placements, running.tokens, partial(self._mark, index)))

    async def deltas(self) -> AsyncGenerator[list[tuple[Choice, Delta]]]:
        """Deltas of all choices, those that are there at the same time together. Raises ApiError.

        When it ends or is closed, whatever still runs is stopped at its worker.
        """
        tasks = [asyncio.create_task(sequence.run()) for sequence in self._sequences]
        self._running.sequences.update(self._sequences)
        unfinished = len(self.choices)
        try:
            while unfinished:
                await self._wake.wait()
                self._wake.clear()
                dirty, self._dirty = self._dirty, {}
                batch = []
                for index in dirty:
                    choice, sequence = self.choices[index], self._sequences[index]
                    if choice.finish_reason is not None:
                        continue
                    if sequence.failure is not None:
                        raise sequence.failure
                    if not (outputs := sequence.take()):
                        continue
                    batch.append((choice, choice.push(outputs)))
                    if choice.finish_reason is not None:
                        unfinished -= 1
                        if not sequence.ended:
                            tasks[index].cancel()  # a stop string: the worker need not go on
                if batch:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.sequences.difference_update(self._sequences)

    @property
    def moves(self) -> int:
        """How often a sequence was placed again."""
        return sum(sequence.attempt for sequence in self._sequences)

    def waterfall(self, arrival: float, outcome: str) -> Waterfall:
        """What it spent its time on since `arrival` (monotonic seconds)."""
        seconds = time.monotonic() - arrival
        return Waterfall(
            request=self.plan.head.request_id,
            trace_id=trace_id(traceparent.get()),
            arrived=time.time() - seconds,
            seconds=seconds,
            outcome=outcome,
            choices=len(self.choices),
            prompt_tokens=sum(map(len, self.plan.prompts)),
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            bars=ordered(self._sequences[0].bars(arrival)),
        )

    def ended(self, arrival: float, outcome: str) -> None:
        """Nothing more comes: it is remembered."""
        self._running.waterfalls.add(self.waterfall(arrival, outcome))

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever `n`."""
        n = self.plan.options.n
        prompt = sum(map(len, self.plan.prompts))
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(sequence.cached_tokens for sequence in self._sequences[::n])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    # Inside

    def _mark(self, index: int) -> None:
        self._dirty[index] = None
        self._wake.set()

    def _spec(self, index: int, prompt: list[int]) -> SequenceSpec:
        plan = self.plan
        options = plan.options
        fits = plan.room - len(prompt)
        max_tokens = fits if options.max_tokens is None else min(options.max_tokens, fits)
        sampling = msgspec.structs.replace(
            options.sampling,
            max_tokens=max_tokens,
            min_tokens=min(options.sampling.min_tokens, max_tokens),
            seed=(options.sampling.seed + index % options.n) % 2**64,
            eos_token_ids=plan.eos_token_ids,
        )
        return SequenceSpec(
            request_id=f"{plan.head.request_id}-{index}",
            model=plan.card.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            fingerprint=plan.card.fingerprint,
            cache_salt=plan.cache_salt,
            tenant=plan.tenant.id,
            weight=plan.tenant.weight,
            session=plan.session,
            priority=options.priority,
            deadline=plan.deadline,
            reply_to=self._running.tokens.address,
            gateway_incarnation=self._running.incarnation,
        )
