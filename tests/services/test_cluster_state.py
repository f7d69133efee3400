"""Membership over a real server: joining, changing, leaving, dying, and a server that dies itself."""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from services.cluster_state import LEASE_SECONDS, ClusterState, ModelMismatch
from services.embedded_state import EmbeddedState, find_server
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


def member(role: str = "decode") -> cluster_pb2.Member:
    found = cluster_pb2.Member(name=role + "-0", role=role, incarnation=secrets.token_hex(16))
    if role == "decode":
        found.model.CopyFrom(cluster_pb2.ModelCard(name="m", fingerprint="f", layout="l", block_size=16))
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fingerprint", "g", r"fingerprint f .* fingerprint g"),
        ("hash_vector", b"\1", r"hash 01"),
    ],
)
async def test_another_model_is_refused(
    connect: Callable[[], "asyncio.Future[ClusterState]"], field: str, value: object, message: str
) -> None:
    first, second, third = await connect(), await connect(), await connect()
    await first.register(member())
    other = member()
    setattr(other.model, field, value)
    with pytest.raises(ModelMismatch, match=message):
        await second.register(other)
    other.model.name = "another name"
    await second.register(other)
    welcome = member()
    welcome.model.layout, welcome.model.block_size = "other", 32  # KV can be moved between different blocks
    await third.register(welcome)
    await until(lambda: len(first.members()) == 3)


async def test_nonsense_in_the_store_is_ignored(
    connect: Callable[[], "asyncio.Future[ClusterState]"], server: EmbeddedState
) -> None:
    watcher = await connect()
    client = redis.asyncio.Redis.from_url(server.url)
    stolen = member("router").SerializeToString()  # under another incarnation's key
    for number, value in enumerate([b"\x80\x04pickle.", b"", b"\xff" * 100, b"{}", stolen]):
        await client.set(f"{watcher._prefix}bad{number}", value, px=3000)
    await watcher._resync()
    assert watcher.malformed >= 5 and watcher.members() == []
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
        left: list[str] = []
        watcher.on_change(lambda change, m: left.append(m.name) if change == "left" else None)
        server.process.kill()
        server.process.wait()
        await asyncio.sleep(LEASE_SECONDS + 1)
        assert len(watcher.members()) == 1  # serving goes on with what is known
        assert not watcher.connected
        again = start_again(server.url)  # it remembers nothing
        try:
            await until(lambda: watcher.connected)
            client = redis.asyncio.Redis.from_url(server.url)
            async with asyncio.timeout(5):
                while not await client.keys("c:member:*") or not await client.exists("c:model:m"):
                    await asyncio.sleep(0.05)
            await client.aclose()
            newcomer = ClusterState(server.url, "c")
            await newcomer.connect()
            await newcomer.register(member("router"))
            await until(lambda: len(watcher.members()) == 2)
            assert left == []
            await newcomer.close()
            await until(lambda: left == ["router-0"])
            await worker.close()
            await until(lambda: watcher.members() == [])
            await watcher.close()
        finally:
            again.kill()
            again.wait()
    finally:
        server.close()


def start_again(url: str) -> "subprocess.Popen[bytes]":
    """Another server on the port and with the password of `url`."""
    parts = urlsplit(url)
    return subprocess.Popen(
        [find_server(), "--port", str(parts.port), "--requirepass", str(parts.password), "--save", ""],
        stdout=subprocess.DEVNULL,
    )


async def test_a_store_that_forgets_makes_nobody_leave(
    connect: Callable[[], "asyncio.Future[ClusterState]"], server: EmbeddedState
) -> None:
    """As when the server is restarted between two looks at it."""
    watcher, worker = await connect(), await connect()
    await worker.register(member())
    await until(lambda: bool(watcher._heard))
    seen: list[str] = []
    watcher.on_change(lambda change, m: seen.append(change))
    client = redis.asyncio.Redis.from_url(server.url)
    await client.flushall()
    await watcher._resync()
    await client.aclose()
    await asyncio.sleep(1.5)
    assert "left" not in seen


async def test_a_killed_process_leaves_with_its_lease(
    connect: Callable[[], "asyncio.Future[ClusterState]"], server: EmbeddedState
) -> None:
    watcher = await connect()
    code = (
        "import asyncio\n"
        "from services.cluster_state import ClusterState\n"
        "from services.rpc import cluster_pb2\n"
        "async def main():\n"
        f"    state = ClusterState({server.url!r}, {watcher._prefix.split(':')[0]!r})\n"
        "    await state.connect()\n"
        "    await state.register(cluster_pb2.Member(name='r', role='router', incarnation='1' * 32))\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        await until(lambda: [m.name for m in watcher.members()] == ["r"], 30)
        await asyncio.sleep(LEASE_SECONDS + 1)
        assert len(watcher.members()) == 1  # its beats renew the lease
    finally:
        process.kill()
        process.wait()
    await until(lambda: watcher.members() == [])


async def test_no_server_is_a_clear_error() -> None:
    state = ClusterState("redis://127.0.0.1:1/0", "c")
    with pytest.raises(ConnectionError, match="--state"):
        await state.connect(timeout=0.3)
