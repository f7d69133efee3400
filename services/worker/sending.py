"""The prefill side of KV transfers: computes prompts for decode workers and pushes their KV while it is computed.

Carries out what `kv_transfer.sender` decides. Control runs on the event loop; pushes run on the engine thread, right
after the layer that they push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog
import xxhash

from engine.request import Request, TokenOutput
from engine.scheduler import Step
from engine.sequence import Sequence
from kv_transfer import sender as tx
from kv_transfer.connectors.base import ConnectorError, SenderConnector
from kv_transfer.connectors.selection import choose
from kv_transfer.messages import Failed, Order
from kv_transfer.process_identity import identify
from kv_transfer.transfers import SenderTransfers
from services.rpc import transfer_pb2, transfer_pb2_grpc
from services.worker.engine_thread import EngineThread
from services.worker.token_publisher import TokenPublisher
from services.worker.transfer_wire import DamagedFrame, from_receiver_frame, opened, sealed, to_sender_frame

log = structlog.get_logger()


@dataclass(slots=True)
class Peer:
    """One decode worker and the stream from it."""

    incarnation: str
    connector: SenderConnector
    outbox: asyncio.Queue[transfer_pb2.SenderFrame | None] = field(default_factory=asyncio.Queue)


@dataclass(slots=True)
class Sending:
    """One transfer under way. The fields below the line belong to the engine thread."""

    machine: tx.SenderTransfer
    peer: Peer
    # ---
    pushed_tokens: int = 0  # complete blocks up to here are at the receiver, in all layers
    error: str | None = None
    pushing: bool = True

    @property
    def order(self) -> Order:
        """What the receiver asked for."""
        return self.machine.order


class KvSender(transfer_pb2_grpc.TransferServicer):
    """All transfers out of this worker."""

    def __init__(
        self,
        incarnation: str,
        fingerprint: str,
        layout: str,
        engine: EngineThread,
        open_connector: Callable[[str, bytes], SenderConnector],
        tokens: TokenPublisher,
        forced_connector: str | None,
    ) -> None:
        self._identity = identify(incarnation)
        self._fingerprint = fingerprint
        self._layout = layout
        self._engine = engine
        self._open_connector = open_connector
        self._tokens = tokens
        self._forced = forced_connector
        self._loop = asyncio.get_running_loop()
        self._transfers = SenderTransfers()
        self._sending: dict[str, Sending] = {}
        self._exports: dict[str, Sending] = {}  # the same, for the engine thread
        self.draining = False
        self.asleep = False

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._sending)

    async def Connect(
        self,
        request_iterator: AsyncIterator[transfer_pb2.ReceiverFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[transfer_pb2.SenderFrame]:
        """Serves one decode worker until its stream ends."""
        try:
            hello = opened(await anext(aiter(request_iterator))).hello
        except (DamagedFrame, StopAsyncIteration) as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"no handshake: {error}")
        if (hello.fingerprint, hello.layout) != (self._fingerprint, self._layout):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"model {hello.fingerprint}, blocks {hello.layout}: ours are {self._fingerprint}, {self._layout}",
            )
        try:
            offers = [(offer.kind, offer.description) for offer in hello.offers]
            kind, connector, reason = await asyncio.to_thread(choose, offers, self._open_connector, self._forced)
        except ConnectorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("linked", peer=hello.name, connector=kind, reason=reason)
        peer = Peer(hello.incarnation, connector)
        identity = self._identity
        answer = transfer_pb2.SenderHello(
            incarnation=identity.incarnation,
            connector=kind,
            reason=reason,
            boot_id=identity.boot_id,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
        )
        yield sealed(transfer_pb2.SenderFrame(hello=answer))
        reader = self._loop.create_task(self._read(peer, request_iterator))
        try:
            while (frame := await peer.outbox.get()) is not None:
                yield sealed(frame)
        finally:
            reader.cancel()
            for sending in [s for s in self._sending.values() if s.peer is peer]:
                self._carry_out(sending, sending.machine.on_peer_lost())
            while any(sending.peer is peer for sending in self._sending.values()):
                await asyncio.sleep(0.01)  # pushes end before their connector goes
            await asyncio.to_thread(connector.close)

    def tick(self, now: float) -> None:
        """Leases; several times a second."""
        for _, machine, actions in self._transfers.on_tick(now):
            self._carry_out(self._sending[machine.transfer_id], actions)

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        """First tokens go to the gateway and the decode worker at once; then the rest of the bytes is seen out."""
        for output in outputs:
            sending = self._sending.get(output.request_id)
            if sending is None:
                continue
            if output.error is not None or not output.token_ids:
                self._carry_out(sending, sending.machine.failed(output.error or "the prefill gave no token"))
                continue
            logprob = output.logprobs[0] if output.logprobs else None
            order = sending.order
            first = TokenOutput(
                request_id=order.transfer_id.rpartition("/")[0],
                attempt=order.request.attempt,
                index=output.index,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                cached_tokens=output.cached_tokens,
            )
            self._tokens.publish(order.reply_to, [first])
            self._carry_out(sending, sending.machine.first_token(output.token_ids[0], logprob, output.cached_tokens))
            self._loop.create_task(self._see_out(sending))

    def on_layer(self, layer: int, step: Step) -> None:
        """Engine thread: pushes what `step` has computed of this layer."""
        for entry in step.entries:
            sending = self._exports.get(entry.sequence.request_id)
            if sending is None or not sending.pushing or sending.error is not None:
                continue
            try:
                self._push(sending, entry.sequence, layer, entry.end)
            except ConnectorError as error:
                sending.error = str(error)
                self._loop.call_soon_threadsafe(self._push_failed, sending)

    def on_step_end(self, step: Step) -> None:
        """Engine thread: complete blocks need not be pushed again."""
        for entry in step.entries:
            if sending := self._exports.get(entry.sequence.request_id):
                sending.pushed_tokens = entry.end // entry.sequence.block_size * entry.sequence.block_size

    def _push(self, sending: Sending, sequence: Sequence, layer: int, end: int) -> None:
        size = sequence.block_size
        order = sending.order
        # A prefix hit was computed before: it goes out with the first chunk. After a preemption all goes out again.
        first = max(order.skip_blocks, sending.pushed_tokens // size)
        last = min(-(-end // size), order.skip_blocks + len(order.blocks))
        if first < last:
            destination = order.blocks[first - order.skip_blocks : last - order.skip_blocks]
            cache = self._engine.engine.kv_cache.tensor
            sending.peer.connector.push(order.transfer_id, layer, cache, sequence.block_ids[first:last], destination)

    def _push_failed(self, sending: Sending) -> None:
        log.warning("KV push failed", request=sending.machine.transfer_id, reason=sending.error)
        self._carry_out(sending, sending.machine.failed(sending.error or "the push failed"))

    async def _see_out(self, sending: Sending) -> None:
        """After the last step of a prompt: flush, checksums, Done."""
        key = sending.machine.transfer_id
        engine = self._engine.engine
        blocks = await self._engine.call(lambda: engine.held_blocks(key))
        if sending.machine.state is not tx.SenderState.COMPUTING:
            return
        skip = sending.order.skip_blocks

        def flush_and_sum() -> list[int]:
            sending.peer.connector.flush(key)
            views = (engine.kv_cache.block_bytes_view(block) for block in blocks[skip:])
            return [xxhash.xxh3_64_intdigest(view) for view in views]

        try:
            checksums = await asyncio.to_thread(flush_and_sum)
        except ConnectorError as error:
            sending.error = str(error)
            self._push_failed(sending)
        else:
            self._carry_out(sending, sending.machine.pushed(checksums, time.monotonic()))

    async def _read(self, peer: Peer, frames: AsyncIterator[transfer_pb2.ReceiverFrame]) -> None:
        try:
            async for frame in frames:
                self._on_frame(peer, opened(frame))
        except DamagedFrame as error:
            log.warning("link ends", peer=peer.incarnation, reason=str(error))
        finally:
            peer.outbox.put_nowait(None)

    def _on_frame(self, peer: Peer, frame: transfer_pb2.ReceiverFrame) -> None:
        message = from_receiver_frame(frame)
        if message is None:
            return
        if isinstance(message, Order) and (self.draining or self.asleep or message.transfer_id in self._sending):
            reason = "the transfer is under way already"
            if self.draining or self.asleep:
                reason = f"the prefill worker is {'draining' if self.draining else 'asleep'}"
            peer.outbox.put_nowait(to_sender_frame(Failed(message.transfer_id, reason)))
            return
        machine, actions = self._transfers.on_message(peer.incarnation, message, time.monotonic())
        if machine is None:
            for action in actions:
                if isinstance(action, tx.Reply):
                    peer.outbox.put_nowait(to_sender_frame(action.message))
            return
        sending = self._sending.get(machine.transfer_id)
        if sending is None:
            sending = self._sending[machine.transfer_id] = Sending(machine, peer)
        self._carry_out(sending, actions)

    def _carry_out(self, sending: Sending, actions: list[tx.SenderAction]) -> None:
        engine = self._engine.engine
        key = sending.machine.transfer_id
        for action in actions:
            match action:
                case tx.Reply(message):
                    sending.peer.outbox.put_nowait(to_sender_frame(message))
                case tx.StartPrefill():
                    self._engine.post(lambda: self._begin(key, sending))
                case tx.StopPushing():
                    self._loop.create_task(self._stop(sending))
                case tx.Release():
                    self._exports.pop(key, None)
                    self._engine.post(lambda: engine.release(key))
        if sending.machine.state is tx.SenderState.CLOSED:
            self._sending.pop(key, None)
            self._transfers.forget_closed(sending.peer.incarnation, sending.machine, time.monotonic())

    def _begin(self, key: str, sending: Sending) -> None:
        """Engine thread."""
        request: Request = sending.order.request
        self._exports[key] = sending
        self._engine.engine.add(request, hold=True)

    async def _stop(self, sending: Sending) -> None:
        """Pushes run on the engine thread: after a call there, none is under way and none follows."""
        key = sending.machine.transfer_id
        engine = self._engine.engine

        def stop() -> None:
            sending.pushing = False
            self._exports.pop(key, None)
            engine.abort(key)

        await self._engine.call(stop)
        await asyncio.to_thread(sending.peer.connector.stop, key)
        self._carry_out(sending, sending.machine.stopped())
