"""Membership over a real server: joining, changing, leaving, dying, and a server that dies itself."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis.asyncio

from services.cluster_state import LEASE_SECONDS, ClusterState, ModelMismatch
from services.embedded_state import EmbeddedState
from services.rpc import cluster_pb2


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedState]:
    state = EmbeddedState()
    yield state
    state.close()


@pytest.fixture
async def connect(server: EmbeddedState) -> AsyncIterator[Callable[[], "asyncio.Future[ClusterState]"]]:
    """Opens connections under a prefix of the test's own and closes them."""
    opened: list[ClusterState] = []
    cluster = secrets.token_hex(4)

    async def make() -> ClusterState:
        state = ClusterState(server.url, cluster)
        await state.connect()
        opened.append(state)
        return state

    yield make  # type: ignore[misc]
    for state in opened:
        await state.close()


def member(role: str = "decode", fingerprint: str = "f") -> cluster_pb2.Member:
    found = cluster_pb2.Member(name=role + "-0", role=role, incarnation=secrets.token_hex(16))
    if role == "decode":
        found.model.CopyFrom(cluster_pb2.ModelCard(name="m", fingerprint=fingerprint, layout="l", block_size=16))
    return found


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_join_update_leave(connect: Callable[[], "asyncio.Future[ClusterState]"]) -> None:
    watcher, worker = await connect(), await connect()
    seen: list[tuple[str, str]] = []
    watcher.on_change(lambda change, m: seen.append((change, m.name)))
    own = member()
    await worker.register(own)
    await until(lambda: seen == [("joined", "decode-0")])
    own.draining = True
    await worker.announce()
    await until(lambda: ("updated", "decode-0") in seen)
    assert watcher.members("decode")[0].draining
    assert watcher.members("gateway") == []
    await worker.close()
    await until(lambda: seen[-1] == ("left", "decode-0"))
    assert watcher.members() == []


async def test_a_silent_member_leaves_with_its_lease(connect: Callable[[], "asyncio.Future[ClusterState]"]) -> None:
    watcher, worker = await connect(), await connect()
    await worker.register(member())
    await until(lambda: len(watcher.members()) == 1)
    for task in worker._tasks:  # as if the process had been killed: no beats, no goodbye
        task.cancel()
    await until(lambda: watcher.members() == [], LEASE_SECONDS + 3)


async def test_another_model_is_refused(connect: Callable[[], "asyncio.Future[ClusterState]"]) -> None:
    first, second = await connect(), await connect()
    await first.register(member())
    with pytest.raises(ModelMismatch, match=r"fingerprint f .* fingerprint g"):
        await second.register(member(fingerprint="g"))


async def test_nonsense_in_the_store_is_ignored(
    connect: Callable[[], "asyncio.Future[ClusterState]"], server: EmbeddedState
) -> None:
    watcher = await connect()
    client = redis.asyncio.Redis.from_url(server.url)
    for number, value in enumerate([b"\x80\x04pickle.", b"", b"\xff" * 100, b"{}"]):
        await client.set(f"{watcher._prefix}bad{number}", value, px=3000)
    worker = await connect()
    await worker.register(member("router"))
    await until(lambda: len(watcher.members()) == 1)
    await client.aclose()


async def test_a_lost_server_changes_nothing_and_is_found_again() -> None:
    server = EmbeddedState()
    try:
        watcher, worker = ClusterState(server.url, "c"), ClusterState(server.url, "c")
        await watcher.connect()
        await worker.connect()
        await worker.register(member())
        await until(lambda: len(watcher.members()) == 1)
        server.process.kill()
        server.process.wait()
        await asyncio.sleep(LEASE_SECONDS + 1)
        assert len(watcher.members()) == 1  # serving goes on with what is known
        assert not watcher.connected
        await watcher.close()
        await worker.close()
    finally:
        server.close()


async def test_no_server_is_a_clear_error() -> None:
    state = ClusterState("redis://127.0.0.1:1/0", "c")
    with pytest.raises(ConnectionError, match="--state"):
        await state.connect(timeout=0.3)
