"""The streams to the workers that send KV to this one: opened when first needed, given up when they fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from kv_transfer.connectors.base import ReceiverConnector, SenderIdentity
from services.rpc import router_pb2, transfer_pb2, transfer_pb2_grpc
from services.rpc_server import make_channel
from services.security import ClusterKey
from services.worker.metrics import WorkerMetrics
from services.worker.transfer_wire import DamagedFrame, opened, sealed

log = structlog.get_logger()

_CONNECT_SECONDS = 2.0
_PAUSE_SECONDS = 1.0  # after a handshake that failed: prompts are computed here meanwhile, without another try


class LinkLost(Exception):
    """The peer cannot be reached, or refuses this worker."""


@dataclass(slots=True, eq=False)
class Link:
    """The stream to one peer and what its handshake agreed on."""

    peer: router_pb2.Endpoint
    channel: grpc.aio.Channel
    call: grpc.aio.StreamStreamCall[transfer_pb2.ReceiverFrame, transfer_pb2.SenderFrame]
    connector: str  # kind of the one that new transfers begin with
    sender: SenderIdentity
    outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None]  # None ends the stream
    heard_at: float
    reader: asyncio.Task[None] | None = None


class Links:
    """One stream to each incarnation of a peer. `on_frame` gets what comes; `on_lost` is told when a stream has ended.

    `hello` is this worker's part of the handshake; bytes come over one of `connectors`, by kind.
    """

    def __init__(
        self,
        hello: transfer_pb2.ReceiverHello,
        connectors: Mapping[str, ReceiverConnector],
        key: ClusterKey | None,
        metrics: WorkerMetrics,
        on_frame: Callable[[Link, transfer_pb2.SenderFrame], None],
        on_lost: Callable[[Link], None],
    ) -> None:
        self._hello = hello
        self._connectors = connectors
        self._key = key
        self._metrics = metrics
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._links: dict[str, asyncio.Task[Link]] = {}  # by the peer's incarnation
        self._try_again_at: dict[str, float] = {}  # peers whose last handshake failed

    async def to(self, peer: router_pb2.Endpoint) -> Link:
        """The stream to a peer; opened once per incarnation, also if nobody waits for it any more. Raises LinkLost."""
        task = self._links.get(peer.incarnation)
        if task is None or (_has_failed(task) and time.monotonic() >= self._try_again_at.get(peer.incarnation, 0.0)):
            # In no request's context: the stream serves all.
            task = asyncio.get_running_loop().create_task(self._open(peer), context=Context())
            self._links[peer.incarnation] = task
        return await asyncio.shield(task)

    def tick(self, now: float) -> None:
        """Forgets peers that may be tried again, and that are never asked for again if they are gone."""
        for incarnation in [incarnation for incarnation, due in self._try_again_at.items() if due <= now]:
            del self._try_again_at[incarnation]
            task = self._links.get(incarnation)
            if task is not None and _has_failed(task):
                del self._links[incarnation]

    def end(self, link: Link, reason: str) -> None:
        """The stream is of no use any more: the next transfer opens another, and connectors with it."""
        log.warning("link ends", peer=link.peer.name, reason=reason)
        self._forget(link)
        link.call.cancel()

    async def close(self) -> None:
        """Closes all links."""
        for link_task in self._links.values():
            if link_task.done() and not _has_failed(link_task):
                await link_task.result().channel.close()
            else:
                link_task.cancel()

    async def _open(self, peer: router_pb2.Endpoint) -> Link:
        channel = make_channel(peer.address, self._key)
        outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None] = asyncio.Queue()
        try:
            link = await self._shake_hands(peer, channel, outbox)
        except BaseException:
            outbox.put_nowait(None)
            self._try_again_at[peer.incarnation] = time.monotonic() + _PAUSE_SECONDS
            await channel.close()
            raise
        self._try_again_at.pop(peer.incarnation, None)
        link.reader = asyncio.get_running_loop().create_task(self._read(link))
        return link

    async def _shake_hands(
        self,
        peer: router_pb2.Endpoint,
        channel: grpc.aio.Channel,
        outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None],
    ) -> Link:
        hello = transfer_pb2.ReceiverHello()
        hello.CopyFrom(self._hello)
        for kind, connector in self._connectors.items():
            hello.offers.add(kind=kind, description=connector.describe())
        outbox.put_nowait(transfer_pb2.ReceiverFrame(hello=hello))
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                call = transfer_pb2_grpc.TransferStub(channel).Connect(_frames(outbox))
                answer = await call.read()
                answered = None if answer is grpc.aio.EOF else opened(answer).hello
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
            raise LinkLost(f"{peer.name}: {detail}") from error
        except DamagedFrame as error:
            self._metrics.refused_frames.labels("control", "damaged").inc()
            raise LinkLost(f"{peer.name}: {error}") from error
        if answered is None or not answered.incarnation:
            raise LinkLost(f"{peer.name} closed the stream in the handshake")
        if answered.incarnation != peer.incarnation:
            raise LinkLost(f"{peer.name} was restarted")
        if answered.connector not in self._connectors:
            raise LinkLost(f"{peer.name} chose the connector {answered.connector!r}, which was not offered")
        sender = SenderIdentity(peer.incarnation, answered.boot_id, answered.pid, answered.start_ticks)
        log.info("linked", peer=peer.name, connector=answered.connector, reason=answered.reason)
        return Link(peer, channel, call, answered.connector, sender, outbox, time.monotonic())

    def _forget(self, link: Link) -> None:
        task = self._links.get(link.peer.incarnation)
        if task is not None and task.done() and not _has_failed(task) and task.result() is link:
            del self._links[link.peer.incarnation]

    async def _read(self, link: Link) -> None:
        reason = "the stream ended"
        try:
            async for frame in link.call:
                link.heard_at = time.monotonic()
                self._on_frame(link, opened(frame))
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except DamagedFrame as error:
            self._metrics.refused_frames.labels("control", "damaged").inc()
            reason = str(error)
        except asyncio.CancelledError:
            reason = "closed"
        except Exception as error:  # its transfers must not wait for a stream that nobody reads
            log.exception("a KV link failed", peer=link.peer.name)
            reason = repr(error)
        log.info("link lost", peer=link.peer.name, reason=reason)
        self._forget(link)
        link.outbox.put_nowait(None)
        self._on_lost(link)
        await link.channel.close()


def _has_failed(task: asyncio.Task[Link]) -> bool:
    """Whether a stream was tried and could not be opened."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _frames(
    outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None],
) -> AsyncIterator[transfer_pb2.ReceiverFrame]:
    while (frame := await outbox.get()) is not None:
        yield sealed(frame)
