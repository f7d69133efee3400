"""A tier in an object store that speaks S3: one object for each block.

The bucket's lifecycle rules bound it: nothing here expires or evicts. An object takes some milliseconds, so many of a
round trip are asked for at once, each over a connection of its own. Credentials are those of the environment
(`AWS_ACCESS_KEY_ID` and its like) or of the machine. Needs the extra `s3`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kv_transfer.tiers.remote import RemoteStore
from kv_transfer.tiers.store import BlockFormat, StoreError

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 64  # objects: each takes a file descriptor


class ObjectStore(RemoteStore):
    """A `Store` in `bucket`, below `cluster`/kv/. `endpoint`: http(s)://host:port; empty: AWS's, of the region.

    `timeout`: seconds of one object. `codec`: see `RemoteStore`. Raises StoreError for what can never work; a store
    that is down can, later.
    """

    name = "object"

    def __init__(
        self,
        bucket: str,
        format: BlockFormat,
        *,
        endpoint: str = "",
        region: str = "us-east-1",
        cluster: str = "tandem",
        key: bytes = b"",
        timeout: float = 5.0,
        codec: int = 0,
    ) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise StoreError(f"object stores need {error.name}: pip install 'tandem-serve[s3]'") from error
        super().__init__(format, key, codec)
        self._api = obstore
        try:
            self._bucket: S3Store = S3Store(
                bucket,
                config={"region": region, **({"endpoint": endpoint} if endpoint else {})},
                client_options={"timeout": f"{timeout}s", "allow_http": endpoint.startswith("http://")},
                retry_config={"max_retries": 0},
            )
        except (BaseError, ValueError) as error:
            raise StoreError(f"{bucket!r} cannot be used as an object store: {error}") from error
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._prefix = f"{cluster}/kv/{format.digest.hex()}/{self._seal.mark}/"

    async def close(self) -> None:
        """Connections end by themselves."""

    async def _exist(self, hashes: Sequence[bytes]) -> list[bool]:
        async def exists(block_hash: bytes) -> bool:
            try:
                await self._api.head_async(self._bucket, self._path(block_hash))
            except FileNotFoundError:
                return False
            return True

        return await self._each(exists, hashes)

    async def _fetch(self, hashes: Sequence[bytes]) -> list[Any]:
        async def fetch(block_hash: bytes) -> Any:
            try:
                answer = await self._api.get_async(self._bucket, self._path(block_hash))
                return await answer.bytes_async()
            except FileNotFoundError:
                return None

        return await self._each(fetch, hashes)

    async def _store(self, values: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        async def put(block: tuple[bytes, bytes]) -> bool:
            await self._api.put_async(self._bucket, self._path(block[0]), block[1])
            return True

        return await self._each(put, values)

    async def _remove(self, hashes: Sequence[bytes]) -> None:
        await self._api.delete_async(self._bucket, [self._path(each) for each in hashes])

    async def _list(self) -> AsyncIterator[bytes]:
        async for some in self._api.list(self._bucket, self._prefix):
            for found in some:
                try:
                    yield bytes.fromhex(found["path"].removeprefix(self._prefix))
                except ValueError:
                    continue  # not one of ours

    async def _each(self, work: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
        """What `work` returns for each. Once it raises for one, the others are given up."""

        async def in_turn(item: T) -> R:
            async with self._places:
                return await work(item)

        tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _path(self, block_hash: bytes) -> str:
        return self._prefix + block_hash.hex()
