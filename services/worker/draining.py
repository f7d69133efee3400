"""Drain on request: a worker takes nothing new, what runs goes on; it takes requests again, or leaves, when told."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import structlog

from services.cluster_state import ClusterState
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.worker.sending import KvSender
from services.worker.servicer import WorkerService

log = structlog.get_logger()


class DrainService(worker_pb2_grpc.DrainServicer):
    """Closes this worker to new requests and opens it again. `stop`: ends the process, as SIGTERM does.

    `member` is what the worker says of itself in the cluster state.
    """

    def __init__(
        self,
        member: cluster_pb2.Member,
        state: ClusterState,
        service: WorkerService,
        sender: KvSender,
        stop: asyncio.Event,
    ) -> None:
        self._member = member
        self._state = state
        self._service = service
        self._sender = sender
        self._stop = stop

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainReply:
        """Takes nothing new; asked again, it says what is left."""
        if not self._member.draining:
            log.info("drains", under_way=self._under_way)
            await self.set(True)
        if request.leave:
            self._stop.set()
        return worker_pb2.DrainReply(under_way=self._under_way)

    async def Undrain(
        self, request: worker_pb2.UndrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.UndrainReply:
        """Takes requests again."""
        if self._stop.is_set():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is leaving")
        if self._member.draining:
            log.info("takes requests again")
            await self.set(False)
        return worker_pb2.UndrainReply()

    async def leave(self) -> None:
        """As `set(True)`, for good."""
        self._member.leaving = True
        await self.set(True)

    async def set(self, draining: bool) -> None:
        """Whether this worker is closed to new requests and transfers; routers are told."""
        self._member.draining = self._sender.draining = self._service.draining = draining
        await self._state.announce()

    @property
    def _under_way(self) -> int:
        return len(self._service.admitted) + self._sender.num_transfers
