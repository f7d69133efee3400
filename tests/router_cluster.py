"""A router with workers as it sees them: their caches, the events that tell of these, and their snapshots."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.hashing import block_hashes, test_vector
from engine.request import BlockStored
from services.config import RouterConfig
from services.router.service import RouterService
from services.rpc import cluster_pb2, cluster_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import RpcServer, make_channel
from services.security import ClusterKey
from services.worker.event_publisher import EventPublisher

BLOCK_SIZE = 16


def chain(name: str, blocks: int = 10) -> list[bytes]:
    return block_hashes(range(blocks * BLOCK_SIZE), BLOCK_SIZE, name.encode())


class Nobody:
    """In place of a socket."""

    def send_multipart(self, frames: list[bytes]) -> None:
        """Nobody hears it."""


class Worker(worker_pb2_grpc.WorkerServicer):
    """A worker as the router sees it: a cache, its events and its snapshots."""

    def __init__(self, incarnation: str, role: str = "decode", key: ClusterKey | None = None) -> None:
        self.held: list[bytes] = []
        self.snapshots = 0
        self.replays = 0
        self.refusals = 0  # answers that fail yet
        self.server = RpcServer("127.0.0.1", 0, key, CollectorRegistry())
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.server)
        self.events = EventPublisher(incarnation, "127.0.0.1", key)
        self.member = cluster_pb2.Member(
            name=role,
            role=role,
            incarnation=incarnation,
            grpc_address=self.server.address,
            events_address=self.events.address,
            fetches=True,
            sends=True,
            model=cluster_pb2.ModelCard(name="m", block_size=BLOCK_SIZE, layout="l", hash_vector=test_vector()),
        )

    async def CacheSnapshot(
        self, request: worker_pb2.CacheSnapshotRequest, context: Any
    ) -> worker_pb2.CacheSnapshotReply:
        self.snapshots += 1
        await self._refuse(context)
        return worker_pb2.CacheSnapshotReply(
            incarnation=self.member.incarnation, sequence=self.events.sequence, block_hashes=self.held
        )

    async def KvEvents(self, request: worker_pb2.KvEventsRequest, context: Any) -> worker_pb2.KvEventsReply:
        await self._refuse(context)
        self.replays += 1
        batches = self.events.since(request.after)
        return worker_pb2.KvEventsReply(
            incarnation=self.member.incarnation, kept=batches is not None, batches=batches or ()
        )

    async def _refuse(self, context: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    def store(self, hashes: list[bytes]) -> None:
        self.held += hashes
        self.events.publish([BlockStored(hashes)])

    def store_unheard(self, hashes: list[bytes]) -> None:
        """The batch that tells of it is lost on its way."""
        socket, self.events._socket = self.events._socket, Nobody()  # type: ignore[assignment]
        self.store(hashes)
        self.events._socket = socket

    async def close(self) -> None:
        self.events.close()
        await self.server.stop(0)


class Cluster:
    """A router with what it hears of its workers."""

    def __init__(self, **config: Any) -> None:
        self.service = RouterService(RouterConfig(**config), None)
        self.server = RpcServer("127.0.0.1", 0, None, self.service.metrics.registry)
        router_pb2_grpc.add_RouterServicer_to_server(self.service, self.server.server)
        self.channel = make_channel(self.server.address, None)
        self.router = router_pb2_grpc.RouterStub(self.channel)
        self.workers: list[Worker] = []
        self._number = 0

    async def join(self, incarnation: str, role: str = "decode", **fields: Any) -> Worker:
        """A worker that the router knows; its events arrive."""
        worker = Worker(incarnation, role)
        for name, value in fields.items():
            setattr(worker, name, value)
        await worker.server.start()
        self.workers.append(worker)
        self.service.on_change("joined", worker.member)
        return worker

    async def followed(self, worker: Worker) -> None:
        """Until the router hears the worker's events."""

        async def heard() -> bool:
            snapshots = worker.snapshots
            worker.store([os.urandom(16)])
            await asyncio.sleep(0.02)
            return await self.cached(worker, worker.held[-1:]) == 1 and worker.snapshots == snapshots

        await eventually(heard)

    async def place(self, hashes: list[bytes] | None = None, **fields: Any) -> router_pb2.Placement:
        self._number += 1
        request = router_pb2.PlaceRequest(
            request_id=f"r{self._number}",
            chains=[router_pb2.HashChain(layout="l", block_hashes=hashes or [])],
            prompt_tokens=160,
            max_tokens=10,
            deadline_seconds=9,
        )
        for name, value in fields.items():
            if name == "exclude_incarnations":
                request.exclude_incarnations.extend(value)
            else:
                setattr(request, name, value)
        return await self.router.Place(request, timeout=30)

    async def cached(self, worker: Worker, hashes: list[bytes]) -> int:
        """Blocks that the router believes to be on `worker`; nothing stays booked."""
        others = [other.member.incarnation for other in self.workers if other is not worker]
        placement = await self.place(hashes, request_id="probe", exclude_incarnations=others)
        await self.router.Release(router_pb2.ReleaseRequest(request_id="probe"))
        return placement.decode_cached_blocks

    async def metric(self, name: str, **labels: str) -> float:
        reply = await cluster_pb2_grpc.NodeStub(self.channel).Metrics(cluster_pb2.MetricsRequest(), timeout=5)
        for family in text_string_to_metric_families(reply.text.decode()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")


@contextlib.asynccontextmanager
async def cluster(**config: Any) -> AsyncIterator[Cluster]:
    made = Cluster(**config)
    await made.server.start()
    try:
        yield made
    finally:
        for worker in made.workers:
            made.service.on_change("left", worker.member)
            await worker.close()
        await made.channel.close()
        await made.server.stop(0)


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


# Caches
