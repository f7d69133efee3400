"""The decode side of KV transfers: orders prefills from peers and brings their KV into the engine.

Carries out what `kv_transfer.receiver` decides. Everything here runs on the event loop; the engine is called through
its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio
import structlog

from engine.request import Request
from kv_transfer import receiver as rx
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ReceiverConnector, SenderIdentity
from kv_transfer.messages import Done, FirstToken, Order, Switch, ToSender
from kv_transfer.references import BlockRef
from kv_transfer.states import ReceiverState
from services.rpc import router_pb2, transfer_pb2, transfer_pb2_grpc
from services.rpc_server import make_channel
from services.security import ClusterKey
from services.worker.engine_thread import EngineThread
from services.worker.metrics import WorkerMetrics
from services.worker.room import Room
from services.worker.timelines import Timeline, Timelines
from services.worker.transfer_wire import DamagedFrame, from_sender_frame, opened, sealed, to_receiver_frame

log = structlog.get_logger()

_CONNECT_SECONDS = 2.0
_PAUSE_SECONDS = 1.0  # after a handshake that failed: prompts are computed here meanwhile, without another try
_LEASE_SECONDS = 5.0
_LATE_BYTES_SECONDS = 5.0  # without another byte after the word that all were sent: the rest will not come
_POLL_SECONDS = 0.001


class LinkLost(Exception):
    """The prefill worker cannot be reached, or refuses this worker."""


@dataclass(slots=True)
class Link:
    """The stream to one prefill worker and what its handshake agreed on."""

    peer: router_pb2.Endpoint
    channel: grpc.aio.Channel
    call: grpc.aio.StreamStreamCall[transfer_pb2.ReceiverFrame, transfer_pb2.SenderFrame]
    connector: str  # kind of the one that new transfers begin with
    sender: SenderIdentity
    outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None]  # None ends the stream
    heard_at: float
    transfers: dict[str, Receiving] = field(default_factory=dict)
    reader: asyncio.Task[None] | None = None

    def is_silent(self, now: float) -> bool:
        """Whether nothing has come for a lease although transfers wait: who is alive answers renewals and aborts."""
        waiting = [r.started for r in self.transfers.values() if r.machine.state is not ReceiverState.VERIFYING]
        return bool(waiting) and now - max(self.heard_at, min(waiting)) >= _LEASE_SECONDS


@dataclass(slots=True)
class Receiving:
    """One transfer under way."""

    machine: rx.ReceiverTransfer
    link: Link
    connector: ReceiverConnector  # the one that may write
    blocks: list[BlockRef]  # pages of all ranks for each block
    timeline: Timeline
    started: float
    landed_at: float = 0.0
    quarantine: list[int] = field(default_factory=list)  # blocks that the writer may still write


class KvReceiver:
    """All transfers into this worker."""

    def __init__(
        self,
        incarnation: str,
        name: str,
        fingerprint: str,
        layout: str,
        engine: EngineThread,
        connectors: list[ReceiverConnector],
        key: ClusterKey | None,
        metrics: WorkerMetrics,
        timelines: Timelines,
    ) -> None:
        self._incarnation = incarnation
        self._name = name
        self._fingerprint = fingerprint
        self._layout = layout
        self._engine = engine
        self._connectors = {connector.capabilities.kind: connector for connector in connectors}  # best first
        self._key = key
        self._metrics = metrics
        self._timelines = timelines
        self._links: dict[str, asyncio.Task[Link]] = {}  # by the peer's incarnation
        self._try_again_at: dict[str, float] = {}  # peers whose last handshake failed
        self._starting: dict[str, asyncio.Task[None]] = {}  # requests that have no transfer yet
        self._transfers: dict[str, Receiving] = {}
        self._room = Room(engine, metrics)
        for connector in connectors:
            metrics.watch(connector.capabilities.kind, connector.counters)

    def start(self, request: Request, prefill: router_pb2.Endpoint, reply_to: str) -> None:
        """Has `prefill` compute the request's prompt; falls back to computing it here."""
        task = asyncio.get_running_loop().create_task(self._start(request, prefill, reply_to))
        self._starting[request.request_id] = task
        task.add_done_callback(lambda _: self._starting.pop(request.request_id, None))

    def abort(self, key: str, reason: str) -> bool:
        """Ends the transfer of a request that is not wanted any more. False: there is none, the engine has it."""
        if task := self._starting.get(key):
            task.cancel()
            self._engine.post(lambda: self._engine.engine.abort(key))
            return True
        receiving = self._transfers.get(key)
        if receiving is None or receiving.machine.state is ReceiverState.ABORTING:
            return False
        self._metrics.transfers.labels("aborted").inc()
        self._carry_out(receiving, receiving.machine.abort(reason, time.monotonic()))
        return True

    def blocks_freed(self) -> None:
        """A step ended: the first request that waits for room tries again."""
        self._room.freed()

    def tick(self, now: float) -> None:
        """Leases, deadlines and fencing; several times a second."""
        self._room.freed()
        self._forget_failed(now)
        for link in {id(receiving.link): receiving.link for receiving in self._transfers.values()}.values():
            if not link.call.done() and link.is_silent(now):
                self._end(link, "the prefill worker is silent")
        for receiving in list(self._transfers.values()):
            machine = receiving.machine
            self._carry_out(receiving, machine.on_tick(now))
            if failure := receiving.connector.failure(machine.transfer_id):
                self._carry_out(receiving, machine.lost(failure, now))
            self._fence(receiving)

    @property
    def waiting_for_blocks(self) -> int:
        """Requests whose prefill may not start yet, since there are no blocks here for its KV."""
        return self._room.waiting

    @property
    def quarantined_blocks(self) -> list[int]:
        """Blocks set aside for writers that have not said that they stopped."""
        return [block for receiving in self._transfers.values() for block in receiving.quarantine]

    async def close(self) -> None:
        """Closes all links."""
        for task in list(self._starting.values()):
            task.cancel()
        for link_task in self._links.values():
            if link_task.done() and not link_task.cancelled() and link_task.exception() is None:
                await link_task.result().channel.close()
            else:
                link_task.cancel()

    # Starting a transfer

    async def _start(self, request: Request, prefill: router_pb2.Endpoint, reply_to: str) -> None:
        key = request.request_id
        engine = self._engine.engine
        timeline = self._timelines.open(key, prefill.incarnation, sends=False)
        timeline.mark("arrived")
        reservation = None
        try:
            await self._link(prefill)  # first: for a peer that is gone nobody has to make room
            timeline.mark("linked", prefill.name)
            reservation = await self._room.reserve(request, timeline)
            link = await self._link(prefill)  # again: that may have taken long
        except asyncio.CancelledError:
            timeline.mark("aborted")
            raise
        except Exception as error:  # whatever it is, the request can still be computed here
            reason = str(error) or "no room for its KV before its deadline"
            log.warning("prefill goes local", request=key, reason=reason)
            timeline.mark("recomputed", reason)
            self._metrics.transfers.labels("recomputed").inc()
            await self._engine.call(partial(engine.recompute, key) if reservation else partial(engine.add, request))
            return
        ranks, num_blocks = engine.kv_cache.spec.ranks, engine.kv_cache.num_blocks
        blocks = [
            BlockRef(self._incarnation, rank * num_blocks + block_id, generation)
            for block_id, generation in zip(
                reservation.block_ids[reservation.num_cached_blocks :],
                reservation.generations[reservation.num_cached_blocks :],
                strict=True,
            )
            for rank in range(ranks)
        ]
        order = Order(
            transfer_id=key,
            request=request,
            blocks=blocks,
            skip_blocks=reservation.num_cached_blocks,
            reply_to=reply_to,
            lease_seconds=_LEASE_SECONDS,
            connector=link.connector,
        )
        now = time.monotonic()
        machine = rx.ReceiverTransfer(order, deadline=request.deadline, spare=self._connectors)
        connector = self._connectors[link.connector]
        receiving = Receiving(machine, link, connector, blocks, timeline, now)
        timeline.record.connector = link.connector
        timeline.mark("reserved", f"{len(blocks)} blocks, {order.skip_blocks} cached")
        connector.expect(key, blocks)
        # From here an abort must find the transfer, not a start that could be called off: the writer is about to write.
        del self._starting[key]
        self._transfers[key] = link.transfers[key] = receiving
        self._carry_out(receiving, receiving.machine.start(now))

    # Links

    async def _link(self, peer: router_pb2.Endpoint) -> Link:
        """The stream to a peer; opened once per incarnation."""
        task = self._links.get(peer.incarnation)
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or (failed and time.monotonic() >= self._try_again_at.get(peer.incarnation, 0.0)):
            task = asyncio.get_running_loop().create_task(self._open(peer))
            self._links[peer.incarnation] = task
        return await asyncio.shield(task)

    def _forget_failed(self, now: float) -> None:
        """Peers that may be tried again, and that are never asked for again if they are gone."""
        for incarnation in [incarnation for incarnation, due in self._try_again_at.items() if due <= now]:
            del self._try_again_at[incarnation]
            task = self._links.get(incarnation)
            if task is not None and task.done() and (task.cancelled() or task.exception() is not None):
                del self._links[incarnation]

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
        hello = transfer_pb2.ReceiverHello(
            incarnation=self._incarnation,
            name=self._name,
            fingerprint=self._fingerprint,
            layout=self._layout,
            offers=[
                transfer_pb2.ConnectorOffer(kind=connector.capabilities.kind, description=connector.describe())
                for connector in self._connectors.values()
            ],
        )
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

    def _end(self, link: Link, reason: str) -> None:
        """The stream is of no use any more: the next transfer opens another, and connectors with it."""
        log.warning("link ends", peer=link.peer.name, reason=reason)
        self._forget(link)
        link.call.cancel()

    def _forget(self, link: Link) -> None:
        task = self._links.get(link.peer.incarnation)
        if task is not None and task.done() and task.result() is link:
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
        now = time.monotonic()
        for receiving in list(link.transfers.values()):
            self._carry_out(receiving, receiving.machine.on_peer_lost(now))
            self._fence(receiving)
        await link.channel.close()

    def _on_frame(self, link: Link, frame: transfer_pb2.SenderFrame) -> None:
        receiving = link.transfers.get(frame.transfer_id)
        message = from_sender_frame(frame)
        if message is None:
            return
        if receiving is None:
            self._metrics.refused_frames.labels("control", "unknown").inc()
            for answer in rx.answer_unknown(message):
                self._send(link, answer.message)
            return
        actions = receiving.machine.on_message(message, time.monotonic())
        if isinstance(message, FirstToken):
            receiving.timeline.mark("first token")
        self._carry_out(receiving, actions)
        if isinstance(message, Switch):
            log.info("KV comes over another connector", request=message.transfer_id, reason=message.reason)
            self._fence(receiving)

    def _send(self, link: Link, message: ToSender) -> None:
        link.outbox.put_nowait(to_receiver_frame(message, time.monotonic()))

    # Actions

    def _carry_out(self, receiving: Receiving, actions: list[rx.Action]) -> None:
        engine = self._engine.engine
        key = receiving.machine.transfer_id
        closed = receiving.machine.closed and key in self._transfers
        if closed:
            receiving.connector.finish(key)  # before the blocks are handed to anybody else
        for action in actions:
            match action:
                case rx.Send(message):
                    self._send(receiving.link, message)
                case rx.Verify(done):
                    receiving.landed_at = time.monotonic()
                    receiving.timeline.mark("landed")
                    asyncio.get_running_loop().create_task(self._verify(receiving, done))
                case rx.Join(token_id, logprob, cached_tokens):
                    receiving.timeline.mark("verified")
                    handoff = partial(engine.commit_handoff, key, token_id, logprob, cached_tokens)
                    self._engine.post(partial(self._commit, receiving, handoff))
                case rx.Recompute(reason):
                    log.warning("KV transfer failed, the prompt is computed here", request=key, reason=reason)
                    self._metrics.transfers.labels("recomputed").inc()
                    receiving.timeline.mark("recomputed", reason)
                    self._engine.post(partial(engine.recompute, key))
                case rx.Detach(reason, recompute):
                    if recompute:
                        log.warning("KV transfer failed, the prompt is computed here", request=key, reason=reason)
                        self._metrics.transfers.labels("recomputed").inc()
                    receiving.timeline.mark("recomputed" if recompute else "aborted", reason)
                    ranks = engine.kv_cache.spec.ranks
                    receiving.quarantine = [ref.block_id for ref in receiving.blocks[::ranks]]
                    self._engine.post(partial(engine.detach, key, then_wait=recompute))
                case rx.Expect(kind):
                    receiving.connector = self._connectors[kind]
                    receiving.connector.expect(key, receiving.blocks)
                    receiving.link.connector = receiving.timeline.record.connector = kind
                    receiving.timeline.mark("connector", kind)
                case rx.ReleaseBlocks():
                    receiving.timeline.mark("blocks freed", "the writer has stopped or is shut out")
                    blocks, receiving.quarantine = receiving.quarantine, []
                    self._engine.post(partial(engine.release_blocks, blocks))
        if closed:
            del self._transfers[key]
            receiving.link.transfers.pop(key, None)

    def _fence(self, receiving: Receiving) -> None:
        """Shuts out the writer where the machine asks for it."""
        machine = receiving.machine
        if machine.to_be_fenced and receiving.connector.fence(machine.transfer_id, receiving.link.sender):
            self._carry_out(receiving, machine.on_fenced(time.monotonic()))

    def _commit(self, receiving: Receiving, handoff: Callable[[], bool]) -> None:
        """Engine thread."""
        if not handoff():
            return  # aborted in the meantime
        now = time.monotonic()
        receiving.timeline.mark("committed")
        self._metrics.transfers.labels("committed").inc()
        num_bytes = len(receiving.blocks) * self._engine.engine.kv_cache.spec.block_bytes
        receiving.timeline.record.bytes = num_bytes
        self._metrics.transfer_bytes.labels(receiving.connector.capabilities.kind).inc(num_bytes)
        order = receiving.machine.order
        skipped = order.skip_blocks * self._engine.engine.kv_cache.spec.block_size
        # Of a request that has moved here, output may be cached as well: then nothing of the prompt was transferred.
        self._metrics.prompt_tokens.labels("transferred").inc(max(0, len(order.request.prompt_token_ids) - skipped))
        self._metrics.transfer_seconds.observe(now - receiving.started)
        self._metrics.exposed_seconds.observe(now - receiving.landed_at + receiving.machine.seconds_since_compute)

    async def _verify(self, receiving: Receiving, done: Done) -> None:
        """Waits for what was sent, shuts the writer out, and only then compares: what is right must stay right."""
        machine, link, key = receiving.machine, receiving.link, receiving.machine.transfer_id
        connector, pages = receiving.connector, self._engine.engine.pages
        before, late_at = -1, 0.0
        while is_late := (landed := connector.bytes_landed(key)) is not None and landed < done.num_bytes:
            if landed != before:
                before, late_at = landed, time.monotonic() + _LATE_BYTES_SECONDS
            gone = machine.state is not ReceiverState.VERIFYING or connector.failure(key) is not None
            if gone or time.monotonic() > late_at:
                break
            await asyncio.sleep(_POLL_SECONDS)
        while not connector.fence(key, link.sender):
            if machine.state is not ReceiverState.VERIFYING:
                return
            await asyncio.sleep(_POLL_SECONDS)
        ordered = [ref.block_id for ref in receiving.blocks]
        try:
            ok = await asyncio.to_thread(lambda: page_sums(pages.tensor, ordered) == done.checksums)
        except Exception:  # also what torch and a device raise: the request goes on without these bytes
            log.exception("KV cannot be compared", request=key)
            ok = False
        self._carry_out(receiving, machine.verified(ok, time.monotonic()))
        if is_late and time.monotonic() > late_at and machine.closed:
            self._end(link, f"of {done.num_bytes} bytes of KV {landed} came, and there is no other connector")


async def _frames(
    outbox: asyncio.Queue[transfer_pb2.ReceiverFrame | None],
) -> AsyncIterator[transfer_pb2.ReceiverFrame]:
    while (frame := await outbox.get()) is not None:
        yield sealed(frame)
