"""The Worker service: admits requests, routes their tokens to the gateway that asked, aborts and drains."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from engine.engine import StepOutput
from engine.request import TokenOutput
from services import tracing
from services.rpc import worker_pb2
from services.worker.cache_service import CacheService
from services.worker.engine_thread import EngineThread
from services.worker.event_publisher import EventPublisher
from services.worker.receiving import KvReceiver
from services.worker.token_publisher import TokenPublisher
from services.worker.wire import request_from_submit, sequence_key, source_from_wire

log = structlog.get_logger()

_TOMBSTONES = 100_000
_TOMBSTONE_SECONDS = 30.0


@dataclass(slots=True)
class Admitted:
    """One attempt of a request that runs here, and where its tokens go."""

    request_id: str
    reply_to: str
    gateway: str  # incarnation
    traceparent: str
    arrived: float  # monotonic seconds
    first_at: float = 0.0


class WorkerService(CacheService):
    """What gateway and router call. `receiver` runs the requests whose prompt, or its beginning, comes from a peer."""

    def __init__(
        self,
        incarnation: str,
        engine: EngineThread,
        receiver: KvReceiver,
        tokens: TokenPublisher,
        events: EventPublisher,
        *,
        max_model_len: int,
        max_waiting: int,
    ) -> None:
        async def held() -> Mapping[str, Sequence[bytes]]:
            return {"": await engine.call(engine.engine.snapshot_hashes)}

        super().__init__(incarnation, events, held)
        self.draining = False
        self.asleep = False
        self.admitted: dict[str, Admitted] = {}
        self._engine = engine
        self._receiver = receiver
        self._tokens = tokens
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # key -> monotonic time of the abort

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SubmitReply:
        """Admits one attempt of a request; its tokens follow over ZMQ."""
        key = sequence_key(request.request_id, request.attempt)
        if request.worker_incarnation != self.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this worker is another incarnation than the one meant"
            )
        if key in self.admitted or key in self._tombstones:
            return worker_pb2.SubmitReply()
        if self.draining or self.asleep:
            reason = "this worker is draining" if self.draining else "this worker is asleep"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if len(self.admitted) >= self._max_waiting:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this worker's queue is full")
        length = len(request.prompt_token_ids) + len(request.output_token_ids)
        if not request.prompt_token_ids or length > self._max_model_len:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{length} tokens do not fit the worker's 1 to {self._max_model_len}",
            )
        engine_request = request_from_submit(request)
        self.admitted[key] = Admitted(
            request.request_id,
            request.reply_to,
            request.gateway_incarnation,
            engine_request.traceparent,
            time.monotonic(),
        )
        source = source_from_wire(request.source) if request.HasField("source") else None
        if request.HasField("prefill"):
            self._receiver.start(engine_request, request.prefill, request.reply_to, source)
        elif source is not None:
            self._receiver.fetch(engine_request, source)
        else:
            self._engine.post(lambda: self._engine.engine.add(engine_request))
        return worker_pb2.SubmitReply()

    async def Abort(
        self, request: worker_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbortReply:
        """Stops one attempt, also one that has not arrived yet."""
        key = sequence_key(request.request_id, request.attempt)
        return worker_pb2.AbortReply(known=self.abort(key, request.reason or "aborted by the gateway"))

    def abort(self, key: str, reason: str) -> bool:
        """Stops the sequence and its transfer; remembers the key so that a late Submit does nothing."""
        admitted = self.admitted.pop(key, None)
        self._tombstones[key] = time.monotonic()
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)
        if admitted is not None:
            log.debug("aborted", request=key, reason=reason)
            if admitted.first_at:
                tracing.record("decode", admitted.traceparent, admitted.first_at, time.monotonic(), finish="abort")
            if not self._receiver.abort(key, reason):
                self._engine.post(lambda: self._engine.engine.abort(key))
        return admitted is not None

    def gateway_left(self, incarnation: str) -> None:
        """A gateway is gone: nobody reads its tokens any more."""
        left = [key for key, admitted in self.admitted.items() if admitted.gateway == incarnation]
        if left:
            log.warning("a gateway is gone, and its requests are aborted", gateway=incarnation, requests=len(left))
        for key in left:
            reply_to = self.admitted[key].reply_to
            self.abort(key, "the gateway is gone")
            self._tokens.forget(reply_to)

    def move_streams(self, reason: str) -> int:
        """Gives all requests up, and tells their gateways to place them again; returns how many they were.

        A gateway goes on behind the last token that it has, so that nothing of an answer is lost or said twice.
        """
        moving = list(self.admitted.items())
        for key, admitted in moving:
            self.abort(key, reason)
            attempt = int(key.rpartition("/")[2])
            moved = TokenOutput(
                request_id=admitted.request_id,
                attempt=attempt,
                index=0,
                token_ids=[],
                finish_reason="abort",
                error=reason,
            )
            self._tokens.publish(admitted.reply_to, [moved])
        return len(moving)

    async def drain(self, timeout: float) -> int:
        """Returns how many requests still run after at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.admitted and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return len(self.admitted)

    def publish(self, step: StepOutput) -> None:
        """Sends a step's tokens to their gateways, one message each, under the ids that the gateways know."""
        by_gateway: dict[str, list[TokenOutput]] = defaultdict(list)
        notes = self._receiver.notes
        for output in step.outputs:
            admitted = self.admitted.get(output.request_id)
            if admitted is None:
                continue  # aborted, or a prefill for another worker
            if not admitted.first_at:
                now = admitted.first_at = time.monotonic()
                output.stages = notes.take_stages(output, step.step, admitted.traceparent, admitted.arrived, now)
            if output.finish_reason is not None:
                del self.admitted[output.request_id]
                self._decoded(admitted, output)
            output.prefill_failed = notes.take_failed(output.request_id)
            output.request_id = admitted.request_id
            by_gateway[admitted.reply_to].append(output)
        for reply_to, batch in by_gateway.items():
            self._tokens.publish(reply_to, batch)

    def _decoded(self, admitted: Admitted, last: TokenOutput) -> None:
        begin, end = admitted.first_at, time.monotonic()
        tokens, finish = last.index + len(last.token_ids), str(last.finish_reason)
        error = last.error or ""
        tracing.record("decode", admitted.traceparent, begin, end, error=error, tokens=tokens, finish=finish)

    def tick(self, now: float) -> None:
        """Forgets old tombstones."""
        while self._tombstones and next(iter(self._tombstones.values())) < now - _TOMBSTONE_SECONDS:
            self._tombstones.popitem(last=False)
