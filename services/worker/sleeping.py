"""Sleep and wake: an idle worker gives its memory back, and takes it again.

A prefill or decode worker can sleep, too. Links to its peers stay, and so does the mapping of shared memory that a peer
has: only the pages behind it go, once no transfer is under way. An order that comes to a sleeping prefill worker is
refused, and the decode worker computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from engine.engine import EngineBusy
from engine.memory import DoesNotFit
from engine.request import KvEvent
from kv_transfer.connectors.base import ConnectorError
from services.cluster_state import ClusterState
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.security import ClusterKey
from services.worker.engine_thread import EngineThread
from services.worker.event_publisher import EventPublisher
from services.worker.last_copy import have_copied, keeper_of
from services.worker.sending import KvSender
from services.worker.servicer import WorkerService

log = structlog.get_logger()

_POLL_SECONDS = 0.02
_COPY_SECONDS = 5.0  # that sleep is put off for the KV service


class SleepService(worker_pb2_grpc.SleepServicer):
    """Puts this worker to sleep and wakes it. `member` is what it says of itself in the cluster state.

    `is_mapped`: peers have mapped the memory of its cache, which cannot be taken away from them.
    """

    def __init__(
        self,
        member: cluster_pb2.Member,
        state: ClusterState,
        thread: EngineThread,
        service: WorkerService,
        sender: KvSender,
        events: EventPublisher,
        key: ClusterKey | None,
        on_crash: Callable[[BaseException], None],
        *,
        is_mapped: bool = False,
    ) -> None:
        self._member = member
        self._state = state
        self._thread = thread
        self._service = service
        self._sender = sender
        self._events = events
        self._key = key
        self._on_crash = on_crash
        self._is_mapped = is_mapped
        self._one_at_a_time = asyncio.Lock()

    async def Sleep(
        self, request: worker_pb2.SleepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SleepReply:
        """Gives memory back while nothing is under way."""
        started = time.monotonic()
        async with self._one_at_a_time:
            if self._member.asleep:
                return worker_pb2.SleepReply(was_asleep=True)
            if self._service.draining:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is draining")
            if self._is_mapped:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "peers have mapped this worker's device memory: on CUDA devices only workers that were started as "
                    "aggregated ones can sleep",
                )
            if self._under_way and not request.drain:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{self._under_way} requests are under way: give --drain to wait",
                )
            await self._have_copied()
            await self._take_requests(False)
            try:
                await self._sleep_when_idle(request, context, started + request.timeout_seconds)
            except BaseException:  # the caller may have gone, and the engine does what it was asked to all the same
                asleep = await self._thread.call(lambda: self._thread.engine.asleep)
                await self._take_requests(not asleep)
                raise
        seconds = time.monotonic() - started
        log.info("asleep", seconds=round(seconds, 3))
        return worker_pb2.SleepReply(seconds=seconds)

    async def Wake(
        self, request: worker_pb2.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WakeReply:
        """Takes the memory again."""
        started = time.monotonic()
        async with self._one_at_a_time:
            if not self._member.asleep:
                return worker_pb2.WakeReply(was_awake=True)
            try:
                await self._thread.call(self._wake)
            except (DoesNotFit, ConnectorError) as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except Exception as error:  # half awake
                self._on_crash(error)
                raise
            await self._take_requests(True)
        seconds = time.monotonic() - started
        log.info("awake", seconds=round(seconds, 3))
        return worker_pb2.WakeReply(seconds=seconds)

    async def _have_copied(self) -> None:
        """Before anybody hears that this worker sleeps, as it then sends nothing any more."""
        if (keeper := keeper_of(self._member, self._state)) is not None:
            hashes = await self._thread.call(self._thread.engine.snapshot_hashes)
            kept = await have_copied(hashes, self._member, keeper, self._key, _COPY_SECONDS)
            log.info("the KV service has what is forgotten", blocks=len(hashes), kept=kept)

    async def _sleep_when_idle(
        self, request: worker_pb2.SleepRequest, context: grpc.aio.ServicerContext[Any, Any], deadline: float
    ) -> None:
        while True:
            reason = f"{self._under_way} requests are under way"
            if not self._under_way:
                try:
                    await asyncio.shield(self._give_back())
                    return
                except EngineBusy as error:  # a peer that was cut off may still write for a while
                    reason = str(error)
                    if not request.drain:
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{reason}: give --drain to wait")
                except Exception as error:  # half asleep
                    self._on_crash(error)
                    raise
            if time.monotonic() > deadline:
                waited = f"after {request.timeout_seconds:g} s {reason}"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, waited)
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def _under_way(self) -> int:
        return len(self._service.admitted) + self._sender.num_transfers

    async def _take_requests(self, awake: bool) -> None:
        """Whether this worker takes requests, and the routers are to give it any."""
        self._service.asleep = self._sender.asleep = self._member.asleep = not awake
        await self._state.announce()

    async def _give_back(self) -> None:
        """Has the engine sleep, and tells what it forgets. Raises EngineBusy."""
        self._events.publish(await self._thread.call(self._sleep))

    def _sleep(self) -> list[KvEvent]:
        """Engine thread."""
        gc.unfreeze()  # what the engine drops must be found
        try:
            self._thread.engine.sleep()
        except EngineBusy:
            gc.freeze()
            raise
        return self._thread.engine.drain_events()

    def _wake(self) -> None:
        """Engine thread."""
        self._thread.engine.wake()
        gc.collect()
        gc.freeze()
