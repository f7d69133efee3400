"""Workers that are to be started or ended, as words in the cluster state that whoever runs processes there acts upon.

What is wanted stands there until it is so: a planner or a supervisor that dies in between finds it again.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from planner.window import Role
from services.redis_client import redis_client


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to become of one worker's process."""

    what: Literal["run", "end"]
    model: str
    role: Role  # that it is started in
    since: float  # unix seconds


class Wanted:
    """The wishes, by the worker's name. All methods raise one of REDIS_ERRORS where the store does not answer."""

    def __init__(self, url: str, cluster: str) -> None:
        self._redis = redis_client(url)
        self._key = f"{cluster}:wanted"

    async def all(self) -> dict[str, Wish]:
        """Those that can be read."""
        found = {}
        stored: Any = await self._redis.hgetall(self._key)  # bytes, as the client decodes nothing
        for name, value in stored.items():
            try:
                found[name.decode()] = msgspec.json.decode(value, type=Wish)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        return found

    async def run(self, name: str, model: str, role: Role) -> None:
        """A worker of this name is to run."""
        await self._put(name, Wish("run", model, role, time.time()))

    async def end(self, name: str, model: str, role: Role) -> None:
        """It is to drain and to end, and not to be started again."""
        await self._put(name, Wish("end", model, role, time.time()))

    async def clear(self) -> None:
        """Of a cluster that begins."""
        await self._redis.delete(self._key)

    async def close(self) -> None:
        """Disconnects."""
        await self._redis.aclose()

    async def _put(self, name: str, wish: Wish) -> None:
        await self._redis.hset(self._key, name, msgspec.json.encode(wish).decode())
