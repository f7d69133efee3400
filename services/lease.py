"""Leases in the cluster state: what one process at a time may do. Who dies loses it when its time has run out."""

from __future__ import annotations

import redis.asyncio
import redis.exceptions


class Lease:
    """A key with the name of its holder. All methods raise one of REDIS_ERRORS where the store does not answer.

    Plain commands and transactions: the user of the store may have no scripts.
    """

    def __init__(self, client: redis.asyncio.Redis, key: str, holder: str, seconds: float) -> None:
        self._redis = client
        self._key = key
        self._holder = holder
        self._milliseconds = int(1000 * seconds)

    async def take(self) -> str:
        """Takes it if it is free, renews it if it is this holder's; returns whose it is now."""
        if await self._redis.set(self._key, self._holder, nx=True, px=self._milliseconds):
            return self._holder
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._key)
            holder = await pipe.get(self._key)
            if holder == self._holder.encode():
                pipe.multi()
                pipe.pexpire(self._key, self._milliseconds)
                try:
                    await pipe.execute()
                except redis.exceptions.WatchError:  # it ran out meanwhile, and somebody has it
                    holder = await self._redis.get(self._key)
        return holder.decode(errors="replace") if isinstance(holder, bytes) else ""

    async def give_back(self) -> None:
        """Ends it, if it is this holder's."""
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._key)
            if await pipe.get(self._key) == self._holder.encode():
                pipe.multi()
                pipe.delete(self._key)
                try:
                    await pipe.execute()
                except redis.exceptions.WatchError:  # it ran out meanwhile
                    return
