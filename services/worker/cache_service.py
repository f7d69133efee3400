"""What routers and the KV service ask of whoever publishes KV events: all that it has, and events that they missed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc.aio

from services.rpc import worker_pb2, worker_pb2_grpc
from services.worker.event_publisher import EventPublisher


class CacheService(worker_pb2_grpc.WorkerServicer):
    """The part of the Worker service that tells of the cache."""

    def __init__(
        self, incarnation: str, events: EventPublisher, held: Callable[[], Awaitable[Mapping[str, Sequence[bytes]]]]
    ) -> None:
        """`held`: hashes of all that can be found, by the nearest tier; a worker's are in "". Changes are published."""
        self.incarnation = incarnation
        self._events = events
        self._held = held

    async def CacheSnapshot(
        self, request: worker_pb2.CacheSnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.CacheSnapshotReply:
        """The hashes that can be found now, with the number of the last event they include."""
        # Taken before the snapshot: events in between are applied twice by the reader, which changes nothing.
        sequence = self._events.sequence
        held = await self._held()
        return worker_pb2.CacheSnapshotReply(
            incarnation=self.incarnation,
            sequence=sequence,
            block_hashes=held.get("", ()),
            tiers=[worker_pb2.TierBlocks(tier=tier, block_hashes=hashes) for tier, hashes in held.items() if tier],
        )

    async def KvEvents(
        self, request: worker_pb2.KvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.KvEventsReply:
        """What was published behind a number."""
        batches = self._events.since(request.after)
        return worker_pb2.KvEventsReply(incarnation=self.incarnation, kept=batches is not None, batches=batches or ())
