"""Who is in the cluster: members register in Redis (or Valkey) under a lease; everybody keeps a local view.

Redis is never in the token path. When it is lost, the view stays as it is and serving goes on; when it is back, members
register again. A member is gone when its lease has run out or it has said goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from services.lease import Lease
from services.redis_client import REDIS_ERRORS, redis_client
from services.rpc import cluster_pb2

log = structlog.get_logger()

LEASE_SECONDS = 2.5
_BEAT_SECONDS = 0.5
_STANDSTILL_SECONDS = 0.9 * LEASE_SECONDS  # between two beats
_RESYNC_SECONDS = 1.0
_SILENCE_SECONDS = 5.0  # without any news: the connection may be dead
_OLDEST_VERSION = 7
_ROLES = ("gateway", "router", "prefill", "decode", "aggregated", "kv", "planner")

Change = Callable[[str, cluster_pb2.Member], None]  # ("joined" | "updated" | "left", member)


class ModelMismatch(Exception):
    """This worker has another model of a name than the cluster's other workers."""


class ClusterState:
    """One process's connection to the cluster state at `url`, under the key prefix `cluster`."""

    def __init__(self, url: str, cluster: str) -> None:
        self._redis = redis_client(url)
        self._listener = redis_client(url, _SILENCE_SECONDS)
        self._prefix = f"{cluster}:member:"
        self._channel = f"{cluster}:changes"
        self._model_keys = f"{cluster}:model:"
        self._leases = f"{cluster}:lease:"
        self._view: dict[str, cluster_pb2.Member] = {}
        self._heard: dict[str, float] = {}  # when a member's last beat came, monotonic seconds
        self._patient_until = 0.0  # after a time without the store, members get this long to register again
        self._callbacks: list[Change] = []
        self._silence_callbacks: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._own: cluster_pb2.Member | None = None
        self._closing = False
        self.connected = False
        self.malformed = 0  # values in the store that were no member

    async def connect(self, timeout: float = 10.0) -> None:
        """Waits until Redis answers and the first view is complete. Raises ConnectionError with what to do."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                version = await self._version()
                await self._resync()
                break
            except REDIS_ERRORS as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(f"the cluster state does not answer ({error}); is --state right?") from error
                await asyncio.sleep(0.1)
        if (number := version.split(".")[0]).isdigit() and int(number) < _OLDEST_VERSION:
            raise ConnectionError(f"the cluster state is Redis {version}; version {_OLDEST_VERSION} or newer is needed")
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(self._watch()), loop.create_task(self._listen())]

    def on_change(self, callback: Change) -> None:
        """Calls `callback` for each member that joins, changes or leaves; at once for those known already."""
        self._callbacks.append(callback)
        for member in list(self._view.values()):
            callback("joined", member)

    def on_silence(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when this process is known again after it stood still for so long that others gave it up."""
        self._silence_callbacks.append(callback)

    def members(self, *roles: str) -> list[cluster_pb2.Member]:
        """All known members, or those with one of `roles`."""
        return [member for member in self._view.values() if not roles or member.role in roles]

    async def register(self, member: cluster_pb2.Member) -> None:
        """Makes this process known and keeps it known. Raises ModelMismatch for another model of a name."""
        if _claims(member):
            await self._claim_model(member.model)
        self._own = member
        await self._beat()
        self._tasks.append(asyncio.get_running_loop().create_task(self._keep_registered()))

    async def announce(self) -> None:
        """Tells a change of the own member (load, draining) now rather than with the next beat."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._beat()

    async def refresh(self) -> None:
        """Takes in what the store says now, rather than a moment later. Raises one of REDIS_ERRORS."""
        await self._resync()

    def lease(self, what: str, holder: str, seconds: float) -> Lease:
        """What one process of the cluster at a time may have or do; `holder` names this one."""
        return Lease(self._redis, f"{self._leases}{what}", holder, seconds)

    async def close(self) -> None:
        """Says goodbye and disconnects, within a few seconds whatever the server does."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            # A client library may turn a cancellation into its own timeout: the loops look at `_closing`, too.
            await asyncio.wait(self._tasks, timeout=1.0)
        with contextlib.suppress(*REDIS_ERRORS):
            async with asyncio.timeout(2.0):
                if self._own is not None:
                    await self._redis.delete(self._prefix + self._own.incarnation)
                    await self._redis.publish(self._channel, self._own.incarnation)
                await self._redis.aclose()
                await self._listener.aclose()

    async def _version(self) -> str:
        info = await self._redis.info("server")
        return str(info.get("valkey_version") or info.get("redis_version"))

    # Writing

    async def _claim_model(self, card: cluster_pb2.ModelCard) -> None:
        """The first worker decides what a model's name stands for; its claim lives as long as any such worker beats."""
        mine, key = _identity(card), self._model_keys + card.name
        lease = int(2 * LEASE_SECONDS * 1000)
        await self._redis.set(key, mine, nx=True, px=lease)
        claimed = await self._redis.get(key)
        if isinstance(claimed, bytes) and claimed != mine:
            raise ModelMismatch(
                f"this cluster serves {claimed.decode(errors='replace')}; this worker has {mine.decode()}. "
                "Give it the same model, dtype and quantization, another --model-name, or another --cluster name"
            )

    async def _beat(self) -> None:
        assert self._own is not None
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + self._own.incarnation, self._own.SerializeToString(), px=int(LEASE_SECONDS * 1000))
            pipe.publish(self._channel, self._own.incarnation)
            if _claims(self._own):
                own = self._own.model
                pipe.set(self._model_keys + own.name, _identity(own), px=int(2 * LEASE_SECONDS * 1000))
            await pipe.execute()

    async def _keep_registered(self) -> None:
        was_silent = False
        while not self._closing:
            begun = time.monotonic()
            await asyncio.sleep(_BEAT_SECONDS * random.uniform(0.8, 1.2))
            try:
                await self._beat()
                beaten = True
            except REDIS_ERRORS:
                beaten = False
            # A store that does not answer takes less: then this process, or its machine, stood still.
            if time.monotonic() - begun > _STANDSTILL_SECONDS:
                was_silent = True
            if beaten and was_silent:
                was_silent = False
                log.warning("this process stood still for longer than its lease", seconds=time.monotonic() - begun)
                for callback in self._silence_callbacks:
                    callback()

    # Watching

    async def _watch(self) -> None:
        """Compares the whole view once a second: whatever a lost message hid is seen here."""
        while not self._closing:
            await asyncio.sleep(_RESYNC_SECONDS * random.uniform(0.8, 1.2))
            try:
                await self._resync()
            except REDIS_ERRORS as error:
                if self.connected:
                    log.warning("the cluster state is lost; serving goes on with what is known", error=str(error))
                self.connected = False

    async def _resync(self) -> None:
        keys = [key async for key in self._redis.scan_iter(match=self._prefix + "*", count=1000)]
        values = await self._redis.mget(keys) if keys else []
        found = {key: member for key, value in zip(keys, values, strict=True) if (member := self._decode(key, value))}
        now = time.monotonic()
        if not self.connected:
            self.connected = True
            if self._view:
                log.info("the cluster state is back")
                self._patient_until = now + 2 * LEASE_SECONDS
        present = {member.incarnation for member in found.values()}
        for incarnation in self._view.keys() - present:
            # Without a beat for a whole lease it is dead. A key that went sooner went with its server, which came back
            # empty; the member will beat again.
            if now > self._patient_until and now - self._heard.get(incarnation, 0.0) > LEASE_SECONDS:
                self._remove(incarnation)
        for member in found.values():
            self._put(member)

    async def _listen(self) -> None:
        """News between two resyncs."""
        while not self._closing:
            try:
                async with self._listener.pubsub() as pubsub:
                    await pubsub.subscribe(self._channel)
                    # With a timeout, since the client library may swallow a cancellation.
                    while not self._closing:
                        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.5)
                        if message is not None:
                            await self._refresh(message["data"].decode(errors="replace"))
            except REDIS_ERRORS:
                await asyncio.sleep(random.uniform(0.2, 0.6))

    async def _refresh(self, incarnation: str) -> None:
        """A member has beaten, or said goodbye: then its key is gone."""
        key = self._prefix + incarnation
        value = await self._redis.get(key)
        if member := self._decode(key.encode(), value):
            self._heard[incarnation] = time.monotonic()
            self._put(member)
        elif value is None:
            self._remove(incarnation)

    def _decode(self, key: bytes, value: object) -> cluster_pb2.Member | None:
        """The member in a value of the shared store; None, counted, for what is none."""
        if not isinstance(value, bytes):
            return None  # expired in between
        try:
            member = cluster_pb2.Member.FromString(value)
        except DecodeError:
            member = cluster_pb2.Member()
        if member.role in _ROLES and key == (self._prefix + member.incarnation).encode():
            return member
        self.malformed += 1
        return None

    def _put(self, member: cluster_pb2.Member) -> None:
        before = self._view.get(member.incarnation)
        self._view[member.incarnation] = member
        if before is None:
            self._tell("joined", member)
        elif before != member:
            self._tell("updated", member)

    def _remove(self, incarnation: str) -> None:
        self._heard.pop(incarnation, None)
        if (member := self._view.pop(incarnation, None)) is not None:
            self._tell("left", member)

    def _tell(self, change: str, member: cluster_pb2.Member) -> None:
        if change != "updated":
            log.debug("member " + change, member=member.name, role=member.role)
        for callback in self._callbacks:
            callback(change, member)


def _claims(member: cluster_pb2.Member) -> bool:
    """Whether it is a worker, so that the cluster serves its model."""
    return member.HasField("model") and member.role != "kv"


def _identity(card: cluster_pb2.ModelCard) -> bytes:
    """What must be equal for two workers to exchange KV; layouts of their blocks may differ (`kv_transfer.plan`)."""
    return f"model {card.name} fingerprint {card.fingerprint} hash {card.hash_vector.hex()}".encode()
