"""The tier in an object store, over S3's protocol on a local server."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import obstore
import pytest
from object_server import Server
from tier_blocks import FORMAT, content, key, room

from kv_transfer.tiers.object_store import ObjectStore
from kv_transfer.tiers.store import StoreError

SECRET = b"the cluster's key"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "a")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "b")
        running = Server()
        yield running
        running.stop()


async def put(store: ObjectStore, *numbers: int) -> list[bool]:
    return await store.put([key(each) for each in numbers], [content(each) for each in numbers])


async def get(store: ObjectStore, *numbers: int) -> list[bool]:
    """What is found; what is, is right."""
    into = room(len(numbers))
    found = await store.get([key(each) for each in numbers], into)
    assert all(
        memory == content(number) for memory, number, is_there in zip(into, numbers, found, strict=True) if is_there
    )
    return found


async def test_what_one_process_puts_another_gets(server: Server) -> None:
    store = ObjectStore("bucket", FORMAT, endpoint=server.url, key=SECRET)
    assert await put(store, 1, 2, 3) == [True] * 3 and await put(store, 2, 4) == [True] * 2
    assert store.counts.stored == 4
    other = ObjectStore("bucket", FORMAT, endpoint=server.url, key=SECRET)
    await other.find()
    assert set(other.hashes()) == {key(each) for each in (1, 2, 3, 4)}
    assert await get(other, 1, 2, 9, 3) == [True, True, False, True]
    assert await other.match([key(1), key(2), key(9)]) == 2
    await other.delete([key(1), key(50)])
    assert await get(store, 1, 2) == [False, True]
    third = ObjectStore("bucket", replace(FORMAT, fingerprint="model-b"), endpoint=server.url, key=SECRET)
    assert await get(third, 2) == [False] and await put(third, 2) == [True]
    await store.clear()
    assert await get(other, 2, 3, 4) == [False] * 3 and await get(third, 2) == [True]


async def test_wrong_objects_are_misses(server: Server) -> None:
    store = ObjectStore("bucket", FORMAT, endpoint=server.url, key=SECRET)
    path, bucket = store._path(key(1)), store._bucket
    for wrong in (lambda value: value[:-1], lambda value: value[:99] + b"x" + value[100:], lambda value: b""):
        await put(store, 1, 2)
        obstore.put(bucket, path, wrong(bytes(obstore.get(bucket, path).bytes())))
        assert await get(store, 1, 2) == [False, True] and await store.match([key(1)]) == 0
    stranger = ObjectStore("bucket", FORMAT, endpoint=server.url)
    assert await get(stranger, 2) == [False]
    assert store.counts.corrupt == 3 and stranger.counts.corrupt == 0
    await put(stranger, 1)
    obstore.put(bucket, path, bytes(obstore.get(bucket, stranger._path(key(1))).bytes()))
    assert await get(store, 1) == [False] and store.counts.corrupt == 4


async def test_a_store_that_is_down_costs_little(server: Server) -> None:
    store = ObjectStore("bucket", FORMAT, endpoint=server.url, key=SECRET, timeout=0.5)
    await put(store, 1)
    server.stop()
    try:
        for _ in range(20):
            assert await get(store, 1) == [False] and await put(store, 2) == [False]
        assert 3 <= store.counts.faults <= 5
        with pytest.raises(StoreError, match="try again"):
            await store.clear()
    finally:
        server.start()
    async with asyncio.timeout(30):
        while await put(store, 3) != [True]:
            await asyncio.sleep(0.1)
    assert await get(store, 3) == [True]


async def test_no_such_bucket_is_no_failure(server: Server) -> None:
    store = ObjectStore("nowhere", FORMAT, endpoint=server.url)
    assert await get(store, 1) == [False] and await put(store, 1) == [False]


async def test_many_blocks_take_few_connections(server: Server) -> None:
    waiting = most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting, most
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                waiting += 1
                most = max(most, waiting)
                await asyncio.sleep(0.02)
                waiting -= 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: a\r\n")
                writer.write(b"Last-Modified: Sun, 29 Nov 2026 12:00:00 GMT\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    store = ObjectStore("bucket", FORMAT, endpoint=endpoint, key=SECRET)
    keys = [key(each) for each in range(300)]
    assert await store.match(keys) == 300 and not store.counts.faults
    assert await store.get(keys, room(300)) == [False] * 300
    assert 1 < most <= 64
    listening.close()
