"""A tier in Redis or Valkey: one value for each block, with a TTL that counts from its last use.

The server bounds its memory and evicts (`maxmemory`, `maxmemory-policy allkeys-lru`); it should not be the one that
keeps the cluster's state. An operation that takes longer than the client's timeout is a fault.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio
import redis.exceptions

from kv_transfer.tiers.remote import RemoteStore
from kv_transfer.tiers.store import BlockFormat, StoreError

LARGEST_BLOCK = 32 << 20  # bytes; Redis moves a value at once, and nothing else meanwhile


class RedisStore(RemoteStore):
    """A `Store` among the keys `cluster`:kv:. `client` has a timeout, and retries nothing. `ttl` in seconds.
    `codec`: see `RemoteStore`.

    Raises StoreError for what can never work; a server that is down can, later.
    """

    name = "redis"

    def __init__(
        self,
        client: redis.asyncio.Redis,
        format: BlockFormat,
        *,
        cluster: str = "tandem",
        key: bytes = b"",
        ttl: float = 24 * 3600.0,
        codec: int = 0,
    ) -> None:
        super().__init__(format, key, codec)
        if format.block_bytes > LARGEST_BLOCK:
            raise StoreError(
                f"a block of {format.block_bytes} bytes is too large for Redis, which takes at most {LARGEST_BLOCK}: "
                "make blocks of fewer tokens"
            )
        self._redis = client
        self._prefix = f"{cluster}:kv:{format.digest.hex()}:{self._seal.mark}:".encode()
        self._ttl = int(1000 * ttl)

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _exist(self, hashes: Sequence[bytes]) -> list[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for block_hash in hashes:
            pipeline.exists(self._prefix + block_hash)
        return [bool(each) for each in await pipeline.execute()]

    async def _fetch(self, hashes: Sequence[bytes]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for block_hash in hashes:
            pipeline.getex(self._prefix + block_hash, px=self._ttl)
        answers = await pipeline.execute(raise_on_error=False)
        return [
            b"" if isinstance(each, Exception) and str(each).startswith("WRONGTYPE") else _raised(each)
            for each in answers
        ]

    async def _store(self, values: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for block_hash, value in values:
            pipeline.set(self._prefix + block_hash, value, px=self._ttl)
        answers = await pipeline.execute(raise_on_error=False)
        return [not isinstance(each, redis.exceptions.OutOfMemoryError) and bool(_raised(each)) for each in answers]

    async def _remove(self, hashes: Sequence[bytes]) -> None:
        await self._redis.unlink(*(self._prefix + each for each in hashes))

    async def _list(self) -> AsyncIterator[bytes]:
        async for name in self._redis.scan_iter(match=_literal(self._prefix) + b"*", count=1000):
            yield name[len(self._prefix) :]


def _raised(answer: Any) -> Any:
    """What a command of a pipeline answered."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _literal(prefix: bytes) -> bytes:
    """A pattern of Redis that means these bytes."""
    return b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^-" else bytes([each]) for each in prefix)
