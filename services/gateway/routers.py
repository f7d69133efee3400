"""Which router a gateway asks, and which one hears that an attempt has ended.

Requests are spread over all. Who was asked may have booked the attempt, also where its answer got lost; it tells the
others when that has ended. Where it is gone, one of the others is told.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
import structlog

from services.cluster_state import ClusterState
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

log = structlog.get_logger()

_NOTICE_SECONDS = 2.0
_RELEASE_SECONDS = 10.0  # an end that no router hears for so long is left to the lease
_AGAIN_SECONDS = 0.5


class NoRouter(Exception):
    """No router is known now."""


class Routers:
    """The routers of the cluster. `channel`: to an address."""

    def __init__(self, state: ClusterState, channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._state = state
        self._channel = channel
        self._asked: dict[tuple[str, int], set[str]] = {}  # incarnations, by attempts not released

    def choose(self, request: router_pb2.PlaceRequest, turn: int) -> grpc.aio.Channel:
        """Whom to ask; each further turn, from 1, goes to the next one. Raises NoRouter."""
        routers = self._members()
        if not routers:
            raise NoRouter
        router = routers[(zlib.crc32(request.request_id.encode()) + turn) % len(routers)]
        self._asked.setdefault((request.request_id, request.attempt), set()).add(router.incarnation)
        return self._channel(router.grpc_address)

    async def release(self, request: router_pb2.ReleaseRequest) -> None:
        """Tells that an attempt has ended, and how."""
        asked = self._asked.pop((request.request_id, request.attempt), set())
        until = time.monotonic() + _RELEASE_SECONDS
        while time.monotonic() < until:
            routers = self._members()
            if await self._tell(request, (router for router in routers if router.incarnation in asked)):
                return
            for router in routers:
                if router.incarnation not in asked and await self._tell(request, [router]):
                    return
            await asyncio.sleep(_AGAIN_SECONDS)
        log.debug("no router heard that a request has ended", request=request.request_id)

    async def _tell(self, request: router_pb2.ReleaseRequest, routers: Iterable[cluster_pb2.Member]) -> bool:
        """Whether any has heard it."""
        calls = [answer_of(self._stub(router).Release(request, timeout=_NOTICE_SECONDS)) for router in routers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, grpc.aio.AioRpcError | ChannelClosed):
                raise answer
        return any(isinstance(answer, router_pb2.ReleaseReply) for answer in answers)

    def _members(self) -> list[cluster_pb2.Member]:
        return sorted(self._state.members("router"), key=lambda member: member.incarnation)

    def _stub(self, router: cluster_pb2.Member) -> router_pb2_grpc.RouterStub:
        return router_pb2_grpc.RouterStub(self._channel(router.grpc_address))
