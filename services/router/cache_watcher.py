"""Keeps the block index true for one worker."""

from __future__ import annotations

import asyncio

import grpc.aio
import msgspec
import structlog
import zmq

from engine.request import KvEventBatch
from router.feed import Feed, Verdict
from router.index import BlockIndex
from services.router.metrics import RouterMetrics
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.rpc_server import make_channel
from services.security import ClusterKey
from services.zmq_sockets import sub_socket

log = structlog.get_logger()

_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_RETRY_SECONDS = 0.5  # between two snapshots that a worker does not give
_SNAPSHOT_SECONDS = 5.0


class CacheWatcher:
    """Keeps the index true for one worker: snapshot on join and on gaps, events in between."""

    def __init__(
        self, member: cluster_pb2.Member, row: int, index: BlockIndex, key: ClusterKey | None, metrics: RouterMetrics
    ) -> None:
        self._member = member
        self._row = row
        self._index = index
        self._metrics = metrics
        self._feed = Feed()
        self._socket = sub_socket(member.events_address, b"kv", key)  # raises for a malformed address
        self._channel = make_channel(member.grpc_address, key)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Ends the watch; the caller clears the index."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                try:
                    if self._feed.sequence is None:
                        await self._resync()
                    await self._follow()
                except (grpc.aio.AioRpcError, zmq.ZMQError) as error:
                    log.debug("no snapshot of a worker's cache", worker=self._member.name, error=str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._socket.close(linger=0)
            await self._channel.close()

    async def _follow(self) -> None:
        """Applies events up to the next gap."""
        verdict = Verdict.IGNORE
        while verdict is not Verdict.RESYNC:
            frames = await self._socket.recv_multipart()
            try:
                batch = _decoder.decode(frames[1])
            except (msgspec.MsgspecError, IndexError):
                log.warning("malformed KV events dropped", worker=self._member.name)
                continue
            if batch.incarnation != self._member.incarnation:
                continue
            verdict = self._feed.judge(batch.sequence)
            if verdict is Verdict.APPLY:
                self._index.apply(self._row, batch.events)

    async def _resync(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        snapshot = await stub.CacheSnapshot(worker_pb2.CacheSnapshotRequest(), timeout=_SNAPSHOT_SECONDS)
        if snapshot.incarnation == self._member.incarnation:
            self._index.replace(self._row, snapshot.block_hashes)
            self._feed.snapshot(snapshot.sequence)
            self._metrics.resyncs.inc()
