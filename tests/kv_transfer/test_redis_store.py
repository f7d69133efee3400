"""The tier in Redis, on a real server that is emptied, stopped, killed and lied to."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from store import Store as Server
from tier_blocks import FORMAT, content, key, room

from engine.request import BlockRemoved, BlockStored, CacheCleared
from kv_transfer.tiers.redis_store import LARGEST_BLOCK, RedisStore
from kv_transfer.tiers.seal import SEAL_BYTES
from kv_transfer.tiers.store import StoreError
from services.redis_client import redis_client

SECRET = b"the cluster's key"
PATIENCE = 20.0  # seconds, with a server that is well on a machine that is busy


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: Server) -> Server:
    running.empty()
    return running


async def put(store: RedisStore, *numbers: int) -> list[bool]:
    return await store.put([key(each) for each in numbers], [content(each) for each in numbers])


async def get(store: RedisStore, *numbers: int) -> list[bool]:
    """What is found; what is, is right."""
    into = room(len(numbers))
    found = await store.get([key(each) for each in numbers], into)
    assert all(
        memory == content(number) for memory, number, is_there in zip(into, numbers, found, strict=True) if is_there
    )
    return found


async def test_what_one_process_puts_another_gets(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    assert await put(store, 1, 2, 3) == [True] * 3 and await put(store, 2, 4) == [True] * 2
    assert store.counts.stored == 4
    other = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    await other.find()
    assert set(other.hashes()) == {key(each) for each in (1, 2, 3, 4)} and not other.drain_events()
    assert await get(other, 1, 2, 9, 3) == [True, True, False, True]
    assert await other.match([key(1), key(2), key(9)]) == 2
    await other.delete([key(1)])
    assert await get(store, 1, 2) == [False, True]
    assert store.drain_events() == [
        BlockStored([key(1), key(2), key(3)]),
        BlockStored([key(4)]),
        BlockRemoved([key(1)]),
    ]
    await store.clear()
    assert store.drain_events() == [CacheCleared()] and await get(other, 2, 3, 4) == [False] * 3
    await store.close()
    await other.close()


async def test_many_round_trips(server: Server) -> None:
    format = replace(FORMAT, block_bytes=1 << 20)
    store = RedisStore(redis_client(server.url, PATIENCE), format, key=SECRET)
    keys, blocks = [key(each) for each in range(20)], [content(each, 1 << 20) for each in range(20)]
    writing = asyncio.ensure_future(store.put(keys, blocks))
    while not writing.done():  # the same blocks are counted, packed or not, at any time
        assert store.counts.packed_bytes == (store.counts.written_bytes >> 20) * ((1 << 20) + SEAL_BYTES)
        await asyncio.sleep(0)
    assert await writing == [True] * 20 and store.counts.written_bytes == 20 << 20
    into = room(20, 1 << 20)
    assert await store.get(keys, into) == [True] * 20 and into == blocks
    await store.close()


async def test_others_are_left_alone(server: Server) -> None:
    """Another model's blocks, another cluster's, other keys, and what a pattern would match besides."""
    with redis.Redis.from_url(server.url) as client:
        client.set("tandem:member:1", "x")
        stores = [
            RedisStore(redis_client(server.url, PATIENCE), FORMAT, cluster=cluster)
            for cluster in ("tandem", "tan*", "[a-z]andem", "tandem?")
        ]
        stores.append(RedisStore(redis_client(server.url, PATIENCE), replace(FORMAT, fingerprint="model-b")))
        for store in stores:
            await put(store, 1)
        await stores[1].clear()
        assert [await get(store, 1) for store in stores] == [[True], [False], [True], [True], [True]]
        await stores[0].clear()
        assert client.get("tandem:member:1") == b"x" and await get(stores[4], 1) == [True]
    for store in stores:
        await store.close()


async def test_a_use_renews_the_time(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, ttl=100.0)
    assert await put(store, 1, 2) == [True, True]
    with redis.Redis.from_url(server.url) as client:
        names = client.keys()
        for name in names:
            client.expire(name, 5)
        await get(store, 1)
        assert sorted(client.ttl(name) > 50 for name in names) == [False, True]
    await store.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: b"",
        lambda value: value[:-1],
        lambda value: value + b"x",
        lambda value: value[:100] + bytes([value[100] ^ 1]) + value[101:],
        lambda value: bytes([value[0] ^ 1]) + value[1:],
        lambda value: value[:5] + b"\x09" + value[6:],  # another version
        lambda value: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    ],
)
async def test_wrong_values_are_misses(server: Server, damage) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    assert await put(store, 1, 2) == [True, True]
    with redis.Redis.from_url(server.url) as client:
        (name,) = (each for each in client.scan_iter() if each.endswith(key(1)))
        client.set(name, damage(client.get(name)))
        assert await get(store, 1, 2) == [False, True]
        assert store.counts.corrupt == 1 and not client.exists(name)
        client.rpush(name, "a", "list")
        assert await get(store, 1) == [False] and not client.exists(name)
    await store.close()


async def test_who_has_no_key_can_make_up_nothing(server: Server) -> None:
    """Nor can a block of another hash be put in the place of one, nor does who has another key find ours."""
    stranger, store = (
        RedisStore(redis_client(server.url, PATIENCE), FORMAT),
        RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET),
    )
    await put(stranger, 1)
    assert await get(store, 1) == [False] and store.counts.corrupt == 0
    assert await put(store, 1, 2) == [True, True]
    with redis.Redis.from_url(server.url) as client:
        (open_one,) = (each for each in client.scan_iter() if b":open:" in each)
        sealed = [each for each in client.scan_iter() if each != open_one]
        second, first = sorted(sealed, key=lambda name: name.endswith(key(1)))
        client.copy(open_one, first, replace=True)
        assert await get(store, 1) == [False] and store.counts.corrupt == 1
        assert await get(stranger, 1) == [True]
        assert await put(store, 1) == [True]
        client.rename(first, "x")
        client.rename(second, first)
        client.rename("x", second)
    assert await get(store, 1, 2) == [False, False] and store.counts.corrupt == 3
    await store.close()
    await stranger.close()


async def test_what_redis_let_go_is_announced_no_more(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    assert await put(store, 1, 2, 3) == [True] * 3
    store.drain_events()
    with redis.Redis.from_url(server.url) as client:
        client.delete(*(each for each in client.scan_iter() if each.endswith(key(2))))
    assert await store.match([key(1), key(2), key(3)]) == 1
    assert store.drain_events() == [BlockRemoved([key(2)])] and set(store.hashes()) == {key(1), key(3)}
    await store.close()


async def test_asking_for_nothing_says_nothing_of_the_server(server: Server) -> None:
    store = RedisStore(redis_client("redis://127.0.0.1:1/0", 0.2), FORMAT, key=SECRET)
    for _ in range(8):
        assert await store.match([key(1)]) == 0
    faults = store.counts.faults
    for _ in range(8):
        assert await store.match([]) == 0 and await store.put([], []) == []
        assert await store.match([key(1)]) == 0
    assert store.counts.faults == faults, "the breaker stays open"
    await store.close()


async def test_a_server_that_is_down_costs_little(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    await put(store, 1)
    server.stop()
    try:
        assert await get(store, 1) == [False] and await put(store, 2) == [False]
        assert await store.match([key(1)]) == 0
        assert store.counts.faults == 3
        for _ in range(20):
            assert await get(store, 1) == [False]
        assert store.counts.faults <= 5  # it is left alone
        with pytest.raises(StoreError, match="try again"):
            await store.clear()
    finally:
        server.start()
    async with asyncio.timeout(30):
        while await put(store, 3) != [True]:
            await asyncio.sleep(0.1)
    assert await get(store, 1, 3) == [False, True]  # it came back empty
    await store.close()


async def test_a_server_that_hangs_is_a_quick_miss(server: Server) -> None:
    store = RedisStore(redis_client(server.url, 0.2), FORMAT, key=SECRET)
    await put(store, 1)
    server.pause()
    try:
        began = time.monotonic()
        found = await asyncio.gather(*(get(store, 1) for _ in range(50)))
        assert found == [[False]] * 50
        # One timeout for those at once, the rest is not begun. Far from 50 timeouts, on a busy machine, too.
        assert time.monotonic() - began < 5 and store.counts.faults <= 20
    finally:
        server.resume()
    async with asyncio.timeout(30):
        while await get(store, 1) != [True]:
            await asyncio.sleep(0.1)
    await store.close()


@pytest.mark.parametrize("answer", [b":x\r\n", b"$abc\r\n", b"*x\r\n", b":5\r\n", b"*1\r\n:5\r\n", b"\x00\xff\r\n"])
async def test_a_server_that_breaks_the_protocol_is_a_miss(answer: bytes) -> None:
    """Or one that is no Redis, or answers with other types."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = RedisStore(redis_client(url, 1.0), FORMAT, key=SECRET)
    await store.find()
    assert not store.hashes() and await get(store, 1) == [False] and store.counts.faults == 1
    await put(store, 1)
    assert not store._writing  # what failed is written once the server is well
    await store.delete([key(1)])
    with pytest.raises(StoreError, match="try again"):
        await store.clear()
    await store.close()
    server.close()


async def test_a_clear_that_is_interrupted_has_less_to_do_the_next_time(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    with redis.Redis.from_url(server.url) as client:
        client.mset({store._prefix + key(each): b"" for each in range(2500)})
        listing = store._list

        async def listed_in_part() -> AsyncIterator[bytes]:
            for _ in range(1500):
                yield await anext(each)
            raise ConnectionError

        each = listing()
        store._list = listed_in_part  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="try again"):
            await store.clear()
        assert client.dbsize() == 1500
        store._list = listing  # type: ignore[method-assign]
        await store.clear()
        assert client.dbsize() == 0
    await store.close()


async def test_a_server_without_memory_is_left_alone(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    await put(store, 1)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1mb")
        try:
            assert await put(store, 2, 3) == [False, False]
            assert store.counts.skipped == 2 and not store.counts.faults
            assert await put(store, 4) == [False] and await get(store, 1) == [True]
        finally:
            client.config_set("maxmemory", "0")
    await store.close()


async def test_deleted_while_it_is_written(server: Server) -> None:
    store = RedisStore(redis_client(server.url, PATIENCE), FORMAT, key=SECRET)
    writing = asyncio.ensure_future(put(store, 1, 2))
    while not store._writing:
        await asyncio.sleep(0)
    await store.delete([key(1)])
    assert await writing == [False, True] and await get(store, 1, 2) == [False, True]
    await store.close()


def test_what_cannot_be_a_store() -> None:
    with pytest.raises(StoreError, match="fewer tokens"):
        RedisStore(redis_client("redis://127.0.0.1:1/0"), replace(FORMAT, block_bytes=LARGEST_BLOCK + 1))
