"""The Worker service: admits requests, routes their tokens to the gateway that asked, aborts and drains."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from engine.request import TokenOutput
from services.rpc import worker_pb2, worker_pb2_grpc
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


class WorkerService(worker_pb2_grpc.WorkerServicer):
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
        self.incarnation = incarnation
        self.draining = False
        self.asleep = False
        self.admitted: dict[str, Admitted] = {}
        self._engine = engine
        self._receiver = receiver
        self._tokens = tokens
        self._events = events
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
        self.admitted[key] = Admitted(request.request_id, request.reply_to, request.gateway_incarnation)
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

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainReply:
        """Stops admission and waits for what runs."""
        return worker_pb2.DrainReply(unfinished=await self.drain(request.timeout_seconds))

    async def CacheSnapshot(
        self, request: worker_pb2.CacheSnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.CacheSnapshotReply:
        """The hashes that can be found now, with the number of the last event they include."""
        # Taken before the snapshot: events in between are applied twice by the reader, which changes nothing.
        sequence = self._events.sequence
        hashes = await self._engine.call(self._engine.engine.snapshot_hashes)
        return worker_pb2.CacheSnapshotReply(incarnation=self.incarnation, sequence=sequence, block_hashes=hashes)

    async def KvEvents(
        self, request: worker_pb2.KvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.KvEventsReply:
        """What was published behind a number."""
        batches = self._events.since(request.after)
        return worker_pb2.KvEventsReply(incarnation=self.incarnation, kept=batches is not None, batches=batches or ())

    def abort(self, key: str, reason: str) -> bool:
        """Stops the sequence and its transfer; remembers the key so that a late Submit does nothing."""
        known = self.admitted.pop(key, None) is not None
        self._tombstones[key] = time.monotonic()
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)
        if known:
            log.debug("aborted", request=key, reason=reason)
            if not self._receiver.abort(key, reason):
                self._engine.post(lambda: self._engine.engine.abort(key))
        return known

    def gateway_left(self, incarnation: str) -> None:
        """A gateway is gone: nobody reads its tokens any more."""
        left = [key for key, admitted in self.admitted.items() if admitted.gateway == incarnation]
        if left:
            log.warning("a gateway is gone, and its requests are aborted", gateway=incarnation, requests=len(left))
        for key in left:
            reply_to = self.admitted[key].reply_to
            self.abort(key, "the gateway is gone")
            self._tokens.forget(reply_to)

    async def drain(self, timeout: float) -> int:
        """Stops admission; returns how many requests still run after at most `timeout` seconds."""
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.admitted and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return len(self.admitted)

    def publish(self, outputs: list[TokenOutput]) -> None:
        """Sends tokens to their gateways, one message each, under the ids that the gateways know."""
        by_gateway: dict[str, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            admitted = self.admitted.get(output.request_id)
            if admitted is None:
                continue  # aborted, or a prefill for another worker
            if output.finish_reason is not None:
                del self.admitted[output.request_id]
            output.prefill_failed = self._receiver.has_failed(output.request_id)
            output.request_id = admitted.request_id
            by_gateway[admitted.reply_to].append(output)
        for reply_to, batch in by_gateway.items():
            self._tokens.publish(reply_to, batch)

    def tick(self, now: float) -> None:
        """Forgets old tombstones."""
        while self._tombstones and next(iter(self._tombstones.values())) < now - _TOMBSTONE_SECONDS:
            self._tombstones.popitem(last=False)
