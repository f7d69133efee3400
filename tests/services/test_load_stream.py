"""Routers that hear each other over a real Redis, which is emptied, stopped and started again."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from router_cluster import Cluster, chain, cluster, eventually
from store import Store
from structlog.testing import capture_logs

from services.router import service
from services.router.load_stream import LoadStream
from services.rpc import cluster_pb2, router_pb2


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def linked(url: str, *routers: Cluster) -> AsyncIterator[list[asyncio.Future[None]]]:
    """They know and hear each other, each by a task."""
    services = [router.service for router in routers]
    streams = [LoadStream(url, "test", each.shared, each.news, each.hear) for each in services]
    tasks = [asyncio.ensure_future(stream.run()) for stream in streams]
    for router in routers:
        for other in routers:
            member = cluster_pb2.Member(name="router", role="router", incarnation=other.service.incarnation)
            router.service.on_change("joined", member)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for stream in streams:
            await stream.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def reservations(router: Cluster) -> float:
    router.service.tick(time.monotonic())
    return await router.metric("tandem_router_reservations")


async def agree(count: int, *routers: Cluster) -> None:
    """Until all know of so many."""

    async def known() -> bool:
        return [await reservations(router) for router in routers] == [count] * len(routers)

    await eventually(known)


async def test_load_and_what_it_leaves_are_known_to_all(store: Store) -> None:
    async with cluster() as first, cluster() as second, linked(store.url, first, second):
        for worker in [await first.join(incarnation) for incarnation in "abcd"]:
            second.service.on_change("joined", worker.member)
        # Once they hear each other: what is expected is told once, also where the store was not there.
        await first.place(request_id="before")
        await agree(1, first, second)
        await first.router.Release(router_pb2.ReleaseRequest(request_id="before"))
        await agree(0, first, second)
        placed = await first.place(chain("x"), request_id="q")
        await agree(1, first, second)
        for number in range(8):
            answer = await second.place(chain("x"), request_id=f"s{number}")
            assert number or answer.decode.incarnation == placed.decode.incarnation  # the next ones spread
        await agree(9, first, second)
        for number in range(8):  # either of them may be told
            router = (first, second)[number % 2].router
            await router.Release(router_pb2.ReleaseRequest(request_id=f"s{number}"))
        await agree(1, first, second)
        await first.router.Release(router_pb2.ReleaseRequest(request_id="q"))
        await agree(0, first, second)
        assert 0 < await first.metric("tandem_router_staleness_seconds") < 5


async def test_a_store_that_is_emptied_or_comes_back_loses_nothing_for_long(store: Store) -> None:
    async with cluster() as first, cluster() as second, linked(store.url, first, second):
        second.service.on_change("joined", (await first.join("a")).member)
        await first.place(request_id="q")
        await agree(1, first, second)
        store.empty()
        await first.place(request_id="r")
        await agree(2, first, second)
        with capture_logs() as logs:
            store.stop()
            placed = await first.place(request_id="s")
            assert placed.decode.incarnation == "a"
            await first.router.Release(router_pb2.ReleaseRequest(request_id="q"))
            await asyncio.sleep(1.5)  # several attempts fail
            assert [await reservations(router) for router in (first, second)] == [2, 2]  # r and s; q and r
            assert await second.metric("tandem_router_staleness_seconds") > 1
            store.start()
            await agree(2, first, second)
            await first.router.Release(router_pb2.ReleaseRequest(request_id="s"))
            await agree(1, first, second)

            async def said() -> bool:
                return sum(entry["event"] == "routers hear each other again" for entry in logs) == 2

            await eventually(said)
        lost = [entry for entry in logs if entry["event"].startswith("routers do not hear")]
        assert len(lost) == 2  # once for each router


async def test_rubbish_in_the_stream_is_dropped(store: Store) -> None:
    async with cluster() as first, cluster() as second, linked(store.url, first, second):
        second.service.on_change("joined", (await first.join("a")).member)
        with redis.Redis.from_url(store.url) as client:
            for fields in ({"m": b"\xc1"}, {"other": b""}):
                client.xadd("test:router-load", fields)
        await first.place(request_id="q")
        await agree(1, first, second)


async def test_bookings_of_a_router_that_is_gone_end_by_any_release(store: Store) -> None:
    async with cluster() as first, cluster() as second, cluster() as third, linked(store.url, first, second, third):
        worker = await first.join("a")
        for router in (second, third):
            router.service.on_change("joined", worker.member)
        await first.place(request_id="q")
        await agree(1, first, second, third)
        gone = cluster_pb2.Member(name="router", role="router", incarnation=first.service.incarnation)
        for router in (second, third):
            router.service.on_change("left", gone)
        await second.router.Release(router_pb2.ReleaseRequest(request_id="q"))
        await agree(0, second, third)


async def test_an_end_that_a_router_has_answered_is_told_also_if_the_router_dies_then(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_TELL_SECONDS", 30.0)  # on a busy machine, too
    async with cluster() as first, cluster() as second, linked(store.url, first, second) as lines:
        second.service.on_change("joined", (await first.join("a")).member)
        for number in range(10):
            await first.place(request_id=f"q{number}")
        await agree(10, first, second)
        await asyncio.gather(*(first.router.Release(router_pb2.ReleaseRequest(request_id=f"q{n}")) for n in range(10)))
        lines[0].cancel()
        await agree(0, second)
