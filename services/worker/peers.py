"""The workers that receive KV from this one: how the stream from one begins, and by which connectors it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from kv_transfer.connectors.base import ConnectorError, SenderConnector
from kv_transfer.connectors.selection import Selection
from kv_transfer.plan import PlanError, TransferPlan
from kv_transfer.process_identity import identify
from services.rpc import transfer_pb2
from services.worker.metrics import WorkerMetrics
from services.worker.transfer_wire import DamagedFrame, opened

log = structlog.get_logger()

OpenConnector = Callable[[str, str, bytes], SenderConnector]  # from the receiver's layout, kind and description


@dataclass(slots=True)
class Peer:
    """One worker that receives and the stream from it."""

    incarnation: str
    plan: TransferPlan
    selection: Selection
    outbox: asyncio.Queue[transfer_pb2.SenderFrame | None] = field(default_factory=asyncio.Queue)
    improving: asyncio.Task[None] | None = None  # tries a connector that had failed

    def improve(self) -> None:
        """Has better connectors than the current one tried again where they have rested enough."""
        if self.selection.is_better_due() and (self.improving is None or self.improving.done()):
            self.improving = asyncio.get_running_loop().create_task(self._try_better())

    async def _try_better(self) -> None:
        try:
            await asyncio.to_thread(self.selection.try_better)
        except ConnectorError as error:  # the link was closed meanwhile
            log.debug("no better connector", peer=self.incarnation, reason=str(error))


class Handshakes:
    """The sender's part of handshakes. `forced`: this kind of connector or none; else the first that works."""

    def __init__(
        self,
        incarnation: str,
        fingerprint: str,
        layout: str,
        open_connector: OpenConnector,
        forced: str | None,
        metrics: WorkerMetrics,
    ) -> None:
        self._identity = identify(incarnation)
        self._fingerprint = fingerprint
        self._layout = layout
        self._open_connector = open_connector
        self._forced = forced
        self._metrics = metrics

    async def shake(
        self, frames: AsyncIterator[transfer_pb2.ReceiverFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Peer:
        """The peer whose stream this is, with the answer in its outbox; or ends the stream with what is wrong."""
        try:
            hello = opened(await anext(aiter(frames))).hello
        except (DamagedFrame, StopAsyncIteration) as error:
            if isinstance(error, DamagedFrame):
                self._metrics.refused_frames.labels("control", "damaged").inc()
            await context.abort(grpc.StatusCode.DATA_LOSS, f"no handshake: {error}")
        if hello.fingerprint != self._fingerprint:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"model {hello.fingerprint}: ours is {self._fingerprint}"
            )
        try:
            plan = TransferPlan(self._layout, hello.layout)
            selection = await self._select(hello)
        except (PlanError, ConnectorError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        chosen = selection.current
        log.info("linked", peer=hello.name, connector=chosen.kind, reason=chosen.reason)
        peer, identity = Peer(hello.incarnation, plan, selection), self._identity
        answer = transfer_pb2.SenderHello(
            incarnation=identity.incarnation,
            connector=chosen.kind,
            reason=chosen.reason,
            boot_id=identity.boot_id,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
        )
        peer.outbox.put_nowait(transfer_pb2.SenderFrame(hello=answer))
        return peer

    async def _select(self, hello: transfer_pb2.ReceiverHello) -> Selection:
        """Opening takes time, and a stream that ends meanwhile must not leave open connectors behind."""
        offers = [(offer.kind, offer.description) for offer in hello.offers]
        open_connector = partial(self._open, hello.layout)
        loop = asyncio.get_running_loop()
        opening = loop.create_task(asyncio.to_thread(Selection, offers, open_connector, self._forced))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise

    def _open(self, layout: str, kind: str, description: bytes) -> SenderConnector:
        connector = self._open_connector(layout, kind, description)
        self._metrics.watch(kind, connector.counters)
        return connector


def _close_opened(opening: asyncio.Task[Selection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, opening.result().close)
