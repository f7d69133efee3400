"""One sequence: a prompt and its growing output, wherever it runs.

The gateway holds the journal of output tokens. When a worker is lost, the sequence is placed again (attempt + 1) and
resumes behind the tokens it has; the sampler is keyed by (seed, position), so the output goes on as if nothing had
happened. An output of another attempt is dropped. So is a token that is known already: the first one comes from the
prefill worker and once more from the decode worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog

from engine.hashing import block_hashes, root_hash
from engine.request import FinishReason, SamplingParams, TokenOutput
from services.gateway.attempt import Attempt
from services.gateway.errors import ApiError, internal, timed_out, unavailable
from services.gateway.placement import Placements, WorkerLost
from services.gateway.token_socket import TokenSocket
from services.gateway.waterfall import Bar
from services.rpc import router_pb2, worker_pb2
from services.worker.wire import sampling_to_wire

log = structlog.get_logger()

_MAX_ATTEMPTS = 10


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed, for whom, and until when."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    fingerprint: str  # of the model
    cache_salt: str
    tenant: str
    weight: float = 1.0  # of the tenant
    session: str
    priority: int
    deadline: float  # time.monotonic()
    reply_to: str  # our token socket
    gateway_incarnation: str


class Sequence:
    """Runs one spec. `wake` is called when there is something to `take`, or when it has ended."""

    def __init__(
        self, spec: SequenceSpec, placements: Placements, tokens: TokenSocket, wake: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.output_token_ids: list[int] = []
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.failure: ApiError | None = None
        self.attempt = 0  # number of the present one
        self.worker: router_pb2.Endpoint | None = None  # that decodes the present attempt
        self._placements = placements
        self._tokens = tokens
        self._wake = wake
        self._fresh: list[TokenOutput] = []
        self._excluded: list[str] = []
        self._asked: router_pb2.PlaceRequest | None = None  # of the router, which may be asked again and again
        self._attempt = Attempt(0)
        self._left: list[Attempt] = []  # that were lost
        self._begun = time.monotonic()
        self._placed = False
        self._lost = False
        self._changed = asyncio.Event()  # finished or lost

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.failure is not None

    def bars(self, arrival: float) -> list[Bar]:
        """What its attempts spent their time on, seconds after `arrival` (monotonic)."""
        return [bar for attempt in (*self._left, self._attempt) for bar in attempt.bars(arrival)]

    def take(self) -> list[TokenOutput]:
        """New outputs, contiguous with those taken before."""
        fresh, self._fresh = self._fresh, []
        return fresh

    async def run(self) -> None:
        """Places and submits until the sequence has ended; never raises. Cancelled: tells worker and router."""
        self._tokens.register(self.spec.request_id, self)
        try:
            while not self.ended:
                await self._run_attempt()
        except ApiError as error:
            self.failure = error
            if error.status < 500:
                self._attempt.outcome = router_pb2.CLIENT_ERROR
        except Exception:
            log.exception("a sequence failed", request=self.spec.request_id)
            self.failure = internal()
        finally:
            self._tokens.unregister(self.spec.request_id)
            if not self.ended:
                self._attempt.outcome = router_pb2.ABORTED
            self._leave("the client is gone or has enough")
            self._wake()

    def receive(self, output: TokenOutput) -> None:
        """An output from a worker."""
        if output.attempt != self.attempt or self.ended or self._lost:
            return
        known = len(self.output_token_ids)
        if output.finish_reason == "error":
            self._attempt.outcome = router_pb2.WORKER_ERROR
            log.warning("a worker ended a request with an error", request=self.spec.request_id, error=output.error)
            self.failure = self._timed_out() if time.monotonic() >= self.spec.deadline else internal()
        elif output.finish_reason == "abort":
            # One that says why it gives the request up has no fault, and still has its KV for others.
            self.lose(output.error or "the worker aborted it", exclude=output.error is None)
            return
        else:
            is_new = self._append(output)
            self._attempt.received(output, len(self.output_token_ids) - known)
            if not is_new:
                return
        if self.ended:
            self._changed.set()
        self._wake()

    def lose(self, reason: str, *, exclude: bool, outcome: router_pb2.Outcome = router_pb2.UNTOLD) -> None:
        """The present attempt is lost. `exclude`: its worker must not get the next one. `outcome`: what it says."""
        if self.ended or self._lost or self.worker is None:
            return
        log.info("a request moves", request=self.spec.request_id, worker=self.worker.name, reason=reason)
        if exclude:
            self._excluded.append(self.worker.incarnation)
        self._lost = True
        self._attempt.outcome = outcome
        self._changed.set()

    def joined(self, incarnation: str) -> None:
        """A worker is there, maybe one that stood still when it was lost: it may have this sequence again."""
        if incarnation in self._excluded:
            self._excluded.remove(incarnation)
            if self._asked is not None and incarnation in self._asked.exclude_incarnations:
                self._asked.exclude_incarnations.remove(incarnation)

    # Inside

    def _append(self, output: TokenOutput) -> bool:
        """Puts the new part of an output into the journal. False: there is none."""
        known = len(self.output_token_ids) - output.index
        if known < 0:
            self.lose("tokens got lost on the way", exclude=False)
            return False
        if output.index == 0:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self._attempt.reused(output.cached_tokens)
        if known:
            if known > len(output.token_ids) or (known == len(output.token_ids) and output.finish_reason is None):
                return False
            output.token_ids = output.token_ids[known:]
            output.logprobs = output.logprobs[known:] if output.logprobs else output.logprobs
            output.index += known
        self.output_token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if self.ended:
            self._attempt.outcome = router_pb2.OK
        self._fresh.append(output)
        return True

    async def _run_attempt(self) -> None:
        self._lost = False
        self._changed.clear()
        if self.output_token_ids and len(self.output_token_ids) >= self.spec.sampling.max_tokens:
            self._end_at_max_tokens()
            return
        self._attempt, is_refused = Attempt(self.attempt), False
        if not self.attempt:
            self._placements.retries.earn(time.monotonic())
        self._placed = True  # even if the answer does not come, the router may hold a reservation
        self._asked = self._place_request()
        placement = await self._placements.place(self._asked, self.spec.deadline)
        self._attempt.placed(placement)
        self.worker = placement.decode
        try:
            await self._placements.submit(self.worker, self._submit_request(placement), self.spec.deadline)
        except WorkerLost as error:
            is_refused = True
            self.lose(str(error), exclude=True, outcome=error.outcome)
        try:
            async with asyncio.timeout(self.spec.deadline - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            raise self._timed_out() from None
        if self._lost:
            self._leave("the request has moved")
            self._left.append(self._attempt)
            self.attempt += 1
            if self.attempt >= _MAX_ATTEMPTS:
                raise unavailable("The request was moved too often")
            begun = bool(self.output_token_ids)
            if is_refused and not begun and not self._placements.retries.spend(time.monotonic()):
                raise unavailable("Too many requests had to be tried again, and this one is not; try again later")

    def _timed_out(self) -> ApiError:
        """The deadline is over: a fault of a worker that gave no token in most of the time that there was; not of one
        that had too much to give, nor of one that got the request when it had waited elsewhere for long."""
        in_vain = not self._attempt.answers and self._attempt.had_most_of(self._begun, self.spec.deadline)
        self._attempt.outcome = router_pb2.TIMED_OUT if in_vain else router_pb2.UNTOLD
        return timed_out()

    def _end_at_max_tokens(self) -> None:
        """All tokens are there; only the word that it has ended was lost."""
        self.finish_reason = "length"
        self._fresh.append(
            TokenOutput(
                request_id=self.spec.request_id,
                attempt=self.attempt,
                index=len(self.output_token_ids),
                token_ids=[],
                finish_reason="length",
            )
        )

    def _leave(self, reason: str) -> None:
        """Ends the present attempt at its worker and at the router."""
        if self.worker is not None and self.finish_reason is None:
            self._placements.abort(self.worker, self.spec.request_id, self.attempt, reason)
        if self._placed:
            self._placements.release(self._attempt.report(self.spec.request_id))
        self.worker, self._placed = None, False

    def _place_request(self) -> router_pb2.PlaceRequest:
        spec = self.spec
        ids = spec.prompt_token_ids + self.output_token_ids
        # Scores of the prompt are not passed on between workers.
        local = spec.sampling.prompt_logprobs is not None or spec.sampling.max_tokens == 0
        return router_pb2.PlaceRequest(
            request_id=spec.request_id,
            attempt=self.attempt,
            chains=[self._hash_chain(*layout, ids) for layout in self._placements.layouts(spec.model)],
            prompt_tokens=len(ids),
            max_tokens=spec.sampling.max_tokens - len(self.output_token_ids),
            tenant=spec.tenant,
            weight=spec.weight,
            session=spec.session,
            priority=spec.priority,
            local_prefill_only=local,
            exclude_incarnations=self._excluded,
            model=spec.model,
        )

    def _hash_chain(self, layout: str, block_size: int, ids: list[int]) -> router_pb2.HashChain:
        root = root_hash(
            fingerprint=self.spec.fingerprint, layout=layout, block_size=block_size, salt=self.spec.cache_salt
        )
        return router_pb2.HashChain(layout=layout, block_hashes=block_hashes(ids, block_size, root))

    def _submit_request(self, placement: router_pb2.Placement) -> worker_pb2.SubmitRequest:
        spec = self.spec
        return worker_pb2.SubmitRequest(
            request_id=spec.request_id,
            attempt=self.attempt,
            prompt_token_ids=spec.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            sampling=sampling_to_wire(spec.sampling),
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            reply_to=spec.reply_to,
            gateway_incarnation=spec.gateway_incarnation,
            prefill=placement.prefill if placement.HasField("prefill") else None,
            worker_incarnation=placement.decode.incarnation,
            source=placement.source if placement.HasField("source") else None,
        )
