"""Follows what one worker has cached, by its KV events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import grpc.aio
import msgspec
import structlog
import zmq

from engine.request import KvEvent, KvEventBatch
from router.feed import Feed, Verdict
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.rpc_server import make_channel
from services.security import ClusterKey
from services.zmq_sockets import sub_socket

log = structlog.get_logger()

_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_RETRY_SECONDS = 0.5  # between two questions that a worker does not answer
_CALL_SECONDS = 5.0
_SILENCE_SECONDS = 5.0  # a worker says twice a second what its last batch was


class _OtherProcess(Exception):
    """The worker's address is another process's by now."""


class CacheListener(Protocol):
    """Who is told what a worker has cached."""

    def replacing(self, held: Mapping[str, Sequence[bytes]]) -> Iterator[None]:
        """These are all blocks that it has, by the nearest tier of the KV service, or of a worker in "".

        They are taken in step by step, as there may be many.
        """
        ...

    def told(self, events: Sequence[KvEvent]) -> None:
        """What has changed since."""
        ...

    def asked(self, *, snapshot: bool) -> None:
        """The worker had to be asked for what events were missing, or for all that it has."""
        ...


class CacheWatcher:
    """Follows one worker: a snapshot first, then events; what is missing is asked for once more."""

    def __init__(self, member: cluster_pb2.Member, listener: CacheListener, key: ClusterKey | None) -> None:
        self._member = member
        self._listener = listener
        self._feed = Feed()
        self._missing = False  # batches that the worker has sent
        self._heard = time.monotonic()
        self._socket = sub_socket(member.events_address, b"kv", key)  # raises for a malformed address
        self._channel = make_channel(member.grpc_address, key)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Ends the watch; the listener is not told."""
        self._task.cancel()

    def is_silent(self, now: float) -> bool:
        """Whether nothing has come for so long that events are lost or not published."""
        return now - self._heard > _SILENCE_SECONDS

    @property
    def knows(self) -> bool:
        """Whether the listener has been told all that the worker holds."""
        return self._feed.sequence is not None

    async def _run(self) -> None:
        try:
            while True:
                try:
                    if self._feed.sequence is None:
                        await self._snapshot()
                    elif self._missing:
                        await self._replay()
                    else:
                        await self._follow()
                except (grpc.aio.AioRpcError, zmq.ZMQError, _OtherProcess) as error:
                    log.debug("a worker's cache is not known", worker=self._member.name, error=str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._socket.close(linger=0)
            await self._channel.close()

    async def _follow(self) -> None:
        """Applies events until some are missing."""
        while True:
            frames = await self._socket.recv_multipart()
            batch = self._decode(frames[-1])
            if batch is None:
                continue
            self._heard = time.monotonic()
            if not batch.events:  # a beat
                self._missing = self._feed.lags(batch.sequence)
            else:
                self._missing = self._apply(batch) is Verdict.REPLAY
            if self._missing:
                return

    async def _replay(self) -> None:
        """Asks for what is missing; if the worker has it no more, a snapshot is next."""
        missing = await self._worker.KvEvents(
            worker_pb2.KvEventsRequest(after=self._feed.sequence or 0), timeout=_CALL_SECONDS
        )
        if missing.incarnation != self._member.incarnation:
            raise _OtherProcess
        if not missing.kept:
            self._feed.forget()
        for data in missing.batches:
            if batch := self._decode(data):
                self._apply(batch)
        if missing.kept:
            self._listener.asked(snapshot=False)
        self._missing = False

    async def _snapshot(self) -> None:
        snapshot = await self._worker.CacheSnapshot(worker_pb2.CacheSnapshotRequest(), timeout=_CALL_SECONDS)
        if snapshot.incarnation != self._member.incarnation:
            raise _OtherProcess
        held = {each.tier: list(each.block_hashes) for each in snapshot.tiers} or {"": list(snapshot.block_hashes)}
        for _ in self._listener.replacing(held):
            await asyncio.sleep(0)  # others have their turn meanwhile
        self._feed.snapshot(snapshot.sequence)
        self._missing = False
        self._listener.asked(snapshot=True)

    def _apply(self, batch: KvEventBatch) -> Verdict:
        verdict = self._feed.judge(batch.sequence)
        if verdict is Verdict.APPLY:
            self._listener.told(batch.events)
        return verdict

    def _decode(self, data: bytes) -> KvEventBatch | None:
        """None: it is malformed, or another process's that has the worker's port by now."""
        try:
            batch = _decoder.decode(data)
        except msgspec.MsgspecError:
            log.warning("malformed KV events dropped", worker=self._member.name)
            return None
        return batch if batch.incarnation == self._member.incarnation else None
