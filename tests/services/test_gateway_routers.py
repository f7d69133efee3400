"""Which routers a gateway asks, and who hears of the end when the one that was asked is gone."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

import pytest
from router_cluster import Cluster, cluster, eventually

from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.gateway.routers import NoRouter, Routers
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc
from services.rpc_server import make_channel


class Gateway:
    """Knows the routers that register; they stay so when they do not answer any more."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.states: list[ClusterState] = []
        self.view = ClusterState(url, "test")
        self.routers = Routers(self.view, functools.cache(lambda address: make_channel(address, None)))

    async def register(self, router: Cluster) -> None:
        state = ClusterState(self._url, "test")
        self.states.append(state)
        await state.connect()
        incarnation = router.service.incarnation
        address = router.server.address
        await state.register(cluster_pb2.Member(role="router", incarnation=incarnation, grpc_address=address))

        async def known() -> bool:
            return len(self.view.members("router")) == len(self.states)

        await eventually(known)

    async def place(self, number: int, turn: int = 1) -> None:
        request = asking(number)
        stub = router_pb2_grpc.RouterStub(self.routers.choose(request, turn))
        await stub.Place(request, timeout=5)

    async def release(self, number: int) -> None:
        await self.routers.release(router_pb2.ReleaseRequest(request_id=f"q{number}"))


@contextlib.asynccontextmanager
async def gateway(*routers: Cluster) -> AsyncIterator[Gateway]:
    server = EmbeddedState()
    made = Gateway(server.url)
    try:
        await made.view.connect()
        for router in routers:
            await made.register(router)
        yield made
        for state in (*made.states, made.view):
            await state.close()
    finally:
        server.close()


def asking(number: int) -> router_pb2.PlaceRequest:
    return router_pb2.PlaceRequest(request_id=f"q{number}", prompt_tokens=160, max_tokens=10, deadline_seconds=9)


async def booked(*routers: Cluster) -> list[float]:
    return [await router.metric("tandem_router_reservations") for router in routers]


async def test_requests_are_spread_and_their_ends_go_to_who_booked_them() -> None:
    async with cluster() as first, cluster() as second, gateway(first, second) as made:
        second.service.on_change("joined", (await first.join("a")).member)
        for number in range(20):
            await made.place(number)
        there = await booked(first, second)
        assert sum(there) == 20 and min(there) > 0
        for number in range(20):
            await made.release(number)
        assert await booked(first, second) == [0, 0]


async def test_another_turn_asks_another_and_both_hear_of_the_end() -> None:
    async with cluster() as first, cluster() as second, gateway(first, second) as made:
        second.service.on_change("joined", (await first.join("a")).member)
        for turn in (1, 2):
            await made.place(1, turn)
        assert await booked(first, second) == [1, 1]
        await made.release(1)
        assert await booked(first, second) == [0, 0]


async def test_the_end_is_told_to_another_if_who_booked_it_is_dead_and_later_if_nobody_is_there() -> None:
    async with cluster() as first, cluster() as second, gateway(first) as made:
        second.service.on_change("joined", (await first.join("a")).member)
        await made.place(1)
        await second.router.Place(asking(1), timeout=5)  # it has heard of it from the other
        await first.server.stop(0)
        telling = asyncio.ensure_future(made.release(1))
        await asyncio.sleep(0.3)
        assert await booked(second) == [1]
        await made.register(second)

        async def told() -> bool:
            return await booked(second) == [0]

        await eventually(told)
        await telling


async def test_no_router() -> None:
    async with gateway() as made:
        with pytest.raises(NoRouter):
            made.routers.choose(asking(1), 1)
