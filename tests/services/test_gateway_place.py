"""A gateway's Place, which a router may hold: it waits as long as the router lives, and not beyond its deadline."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from router_cluster import eventually

import services.gateway.placement
from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.gateway.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placements
from services.gateway.retries import RetryBudget
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc
from services.rpc_server import RpcServer


class Router(router_pb2_grpc.RouterServicer):
    """Holds requests until it is told to answer them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = 0
        self.answers = asyncio.Event()
        self.refuses = ""  # with this many seconds
        self.server = RpcServer("127.0.0.1", 0, None, CollectorRegistry())
        router_pb2_grpc.add_RouterServicer_to_server(self, self.server.server)

    async def Place(self, request: router_pb2.PlaceRequest, context: Any) -> router_pb2.Placement:
        self.held += 1
        try:
            await self.answers.wait()
        finally:
            self.held -= 1
        if self.refuses:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after", self.refuses),))
        return router_pb2.Placement(reason=self.name)

    async def holds(self) -> bool:
        return self.held == 1

    async def is_free(self) -> bool:
        return self.held == 0


class Setting:
    """A gateway's line to routers."""

    def __init__(self, placements: Placements, url: str) -> None:
        self.placements = placements
        self._url = url
        self._states: list[ClusterState] = []
        self._routers: list[Router] = []

    async def join(self, name: str) -> Router:
        router = Router(name)
        await router.server.start()
        self._routers.append(router)
        await self.register(name, router.server.address)
        return router

    async def register(self, name: str, address: str) -> None:
        """Every gateway knows it when this returns."""
        state = ClusterState(self._url, "test")
        await state.connect()
        self._states.append(state)
        await state.register(cluster_pb2.Member(name=name, grpc_address=address, incarnation=name * 32, role="router"))

        async def known() -> bool:
            return name in {member.name for member in self.placements._state.members("router")}

        await eventually(known)

    def place(self, seconds: float = 60.0) -> "asyncio.Task[router_pb2.Placement]":
        request = router_pb2.PlaceRequest(request_id="x", prompt_tokens=10)
        return asyncio.create_task(self.placements.place(request, time.monotonic() + seconds))

    async def close(self) -> None:
        await self.placements.close()
        for state in self._states:
            await state.close()
        for router in self._routers:
            await router.server.stop(0)


@pytest.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setting]:
    """A gateway that waits half a second for routers, and asks every 50 ms whether one lives."""
    monkeypatch.setattr(services.gateway.placement, "_PLACE_SECONDS", 0.05)
    embedded = EmbeddedState()
    state = ClusterState(embedded.url, "test")
    await state.connect()
    setting = Setting(Placements(state, None, 0.5, RetryBudget(GatewayMetrics())), embedded.url)
    yield setting
    await setting.close()
    await state.close()
    embedded.close()


async def test_it_waits_longer_than_for_a_worker_while_the_router_lives(made: Setting) -> None:
    router = await made.join("a")
    placing = made.place()
    await eventually(router.holds)
    await asyncio.sleep(1.0)  # twice as long as it waits where nobody holds it
    assert not placing.done() and await router.holds()
    router.answers.set()
    assert (await placing).reason == "a"


async def test_a_router_that_is_lost_with_what_it_holds_is_replaced(made: Setting) -> None:
    first = await made.join("a")
    placing = made.place()
    await eventually(first.holds)
    await asyncio.sleep(1.0)
    second = await made.join("b")
    second.answers.set()
    await first.server.stop(0)
    assert (await placing).reason == "b"


async def test_a_router_that_is_silent_is_left_for_another(made: Setting) -> None:
    """It takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await made.register("a", f"127.0.0.1:{silent.getsockname()[1]}")
        placing = made.place()
        await asyncio.sleep(0.1)
        router = await made.join("b")
        router.answers.set()
        assert (await placing).reason == "b"


async def test_a_client_that_leaves_is_held_no_longer(made: Setting) -> None:
    router = await made.join("a")
    placing = made.place()
    await eventually(router.holds)
    placing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await placing
    await eventually(router.is_free)


async def test_the_deadline_ends_it_while_it_is_held(made: Setting) -> None:
    router = await made.join("a")
    with pytest.raises(ApiError) as over:
        await made.place(0.7)
    assert over.value.status == 504
    await eventually(router.is_free)


async def test_a_refusal_says_when_to_come_back(made: Setting) -> None:
    router = await made.join("a")
    router.refuses = "7.2"
    router.answers.set()
    with pytest.raises(ApiError) as refused:
        await made.place()
    assert (refused.value.status, refused.value.retry_after) == (429, 8)
