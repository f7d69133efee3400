"""The sending side of KV transfers: computes prompts for peers, or takes them from the cache, and pushes their KV.

Carries out what `kv_transfer.sender` decides. Control runs on the event loop; pushes run on the engine thread, right
after the layer that they push. When a connector fails in mid-transfer, the prompt is computed on while receiver and
sender change to another one, over which everything is pushed again from the blocks that hold it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import grpc
import grpc.aio
import structlog

from engine.engine import StepOutput
from engine.request import TokenOutput
from engine.step import Entry
from kv_transfer import sender as tx
from kv_transfer.connectors.base import ConnectorError, PushRefused
from kv_transfer.connectors.selection import Chosen
from kv_transfer.messages import FETCH, Order, Renew, ToSender
from kv_transfer.plan import SumsOf
from kv_transfer.states import SenderState
from kv_transfer.transfers import SenderTransfers
from services import tracing
from services.rpc import transfer_pb2, transfer_pb2_grpc
from services.worker.engine_thread import HANG_SECONDS, EngineThread
from services.worker.metrics import WorkerMetrics
from services.worker.notes import begun_at
from services.worker.peers import Handshakes, OpenConnector, Peer
from services.worker.receiving import KvReceiver
from services.worker.timelines import Timeline, Timelines
from services.worker.token_publisher import TokenPublisher
from services.worker.transfer_wire import DamagedFrame, from_receiver_frame, opened, sealed, to_sender_frame

log = structlog.get_logger()

_BYTES_AT_ONCE = 64 << 20  # that the engine waits for when complete KV is pushed: some 20 ms over shared memory


@dataclass(slots=True)
class Sending:
    """One transfer under way. The fields below the line belong to the engine thread."""

    machine: tx.SenderTransfer
    to_send: Order  # what was ordered; of a fetch as much as is cached here
    peer: Peer
    tried: set[str]  # kinds of connectors that the receiver has taken bytes from, or was asked to
    chosen: Chosen
    timeline: Timeline
    started: float
    switching: bool = False  # from the failure of a connector until pushes go over the next one
    computed: bool = False  # the first token is there, or, of a fetch, what is cached
    seen_out: Chosen | None = None  # what the rest of the bytes is, or was, seen out over
    # ---
    entered: bool = False  # the engine has the request for this transfer, and not for somebody else
    computed_at: float = 0.0  # when the prompt's last layer was
    block_ids: list[int] = field(default_factory=list)  # of the prompt, as far as it was pushed
    used: Chosen | None = None  # what pushes go over; None while there is nothing to push over
    pushed_tokens: list[int] = field(default_factory=list)  # by layer: tokens that were pushed over `used`
    num_bytes: int = 0  # pushed over `used`


class KvSender(transfer_pb2_grpc.TransferServicer):
    """All transfers out of this worker."""

    def __init__(
        self,
        incarnation: str,
        fingerprint: str,
        layout: str,
        engine: EngineThread,
        open_connector: OpenConnector,
        tokens: TokenPublisher,
        forced_connector: str | None,
        metrics: WorkerMetrics,
        timelines: Timelines,
        receiver: KvReceiver,
    ) -> None:
        self._handshakes = Handshakes(incarnation, fingerprint, layout, open_connector, forced_connector, metrics)
        self._engine = engine
        self._tokens = tokens
        self._metrics = metrics
        self._timelines = timelines
        self._receiver = receiver  # of what prompts begin with, before they are computed
        self._layer_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._transfers = SenderTransfers()
        self._peers: list[Peer] = []
        self._sending: dict[str, Sending] = {}
        self._exports: dict[str, Sending] = {}  # the same, for the engine thread
        self.sums: SumsOf | None = None  # of pages that are known without reading them
        self.draining = False
        self.asleep = False

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._sending)

    @property
    def num_prompts(self) -> int:
        """Those of them for which a prompt is computed here."""
        return sum(not sending.machine.order.cached_only for sending in self._sending.values())

    async def Connect(
        self,
        request_iterator: AsyncIterator[transfer_pb2.ReceiverFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serves one peer until its stream ends.

        Writes instead of yielding: a generator whose stream was cancelled is ended by the garbage collector, some day.
        """
        peer = await self._handshakes.shake(request_iterator, context)
        self._peers.append(peer)
        reader = self._loop.create_task(self._read(peer, request_iterator))
        try:
            while (frame := await peer.outbox.get()) is not None:
                await context.write(sealed(frame))
        finally:
            reader.cancel()
            for sending in [s for s in self._sending.values() if s.peer is peer]:
                self._carry_out(sending, sending.machine.on_peer_lost())
            while any(sending.peer is peer for sending in self._sending.values()):
                await asyncio.sleep(0.01)  # pushes end before their connector goes
            self._peers.remove(peer)
            await asyncio.to_thread(peer.selection.close)

    def tick(self, now: float) -> None:
        """Leases, and connectors that nobody uses any more; several times a second."""
        for _, machine, actions in self._transfers.on_tick(now):
            self._carry_out(self._sending[machine.transfer_id], actions)
        for peer in self._peers:
            in_use = [c.connector for s in self._sending.values() for c in (s.chosen, s.used) if c is not None]
            for connector in peer.selection.take_given_up(in_use):
                self._loop.run_in_executor(None, connector.close)

    def on_step(self, step: StepOutput) -> None:
        """First tokens go to the gateway and the decode worker at once; then the rest of the bytes is seen out."""
        for output in step.outputs:
            sending = self._sending.get(output.request_id)
            if sending is None or not sending.entered:
                continue
            if output.error is not None or not output.token_ids:
                error = output.error or "the prefill gave no token"
                self._prefilled(sending, step, error)
                self._carry_out(sending, sending.machine.failed(error))
                continue
            if not self._engine.engine.pages.tensor.is_cpu:
                sending.computed_at = time.monotonic()  # what is pushed is only begun there
            logprob = output.logprobs[0] if output.logprobs else None
            order = sending.to_send
            first = TokenOutput(
                request_id=order.transfer_id.rpartition("/")[0],
                attempt=order.request.attempt,
                index=output.index,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                cached_tokens=output.cached_tokens,
            )
            sending.timeline.mark("last layer", at=sending.computed_at)
            sending.timeline.mark("first token")
            sampling = order.request.sampling
            if output.token_ids[0] not in sampling.stop_token_ids + sampling.eos_token_ids:
                # One that ends the answer is no text of it: the decode worker will say both at once.
                self._tokens.publish(order.reply_to, [first])
            spent = self._prefilled(sending, step)
            token = sending.machine.first_token(output.token_ids[0], logprob, output.cached_tokens, *spent)
            self._carry_out(sending, token)
            self._complete(sending)

    def _prefilled(self, sending: Sending, step: StepOutput, error: str = "") -> tuple[float, float]:
        """The prompt is computed, now: seconds that it waited for that, and that it took."""
        now, ordered, request = time.monotonic(), sending.started, sending.to_send.request
        begun = max(ordered, begun_at(step.step, request.request_id) or now)
        tracing.record("queue", request.traceparent, ordered, begun, waits_for="a step")
        tracing.record("prefill", request.traceparent, begun, now, error=error, tokens=sending.to_send.num_tokens)
        return begun - ordered, now - begun

    def on_layers(self, layers: range, entries: Sequence[Entry]) -> None:
        """Engine thread: pushes what was computed of these layers."""
        computed = self._layer_at = time.monotonic()
        last = layers.stop == self._engine.engine.kv_cache.spec.num_layers
        for entry in entries:
            sending = self._exports.get(entry.sequence.request_id)
            if sending is None:
                continue
            sending.computed_at = computed
            if sending.used is not None:
                if sending.block_ids is not entry.blocks:  # the first, or those after a preemption: all goes out
                    sending.block_ids, sending.pushed_tokens = entry.blocks, self._nothing_pushed()
                # A prefix hit was computed before: it goes out with the first chunk.
                start = min(entry.start, *sending.pushed_tokens[layers.start : layers.stop])
                self._push(sending, entry.blocks, layers, start, entry.end, computed)
                if last:
                    self._loop.call_soon_threadsafe(self._progressed, sending)

    def _push(
        self, sending: Sending, block_ids: list[int], layers: range, start: int, end: int, computed: float
    ) -> None:
        """Engine thread: pushes the blocks of these tokens, of those that the receiver wants."""
        order, plan, used = sending.to_send, sending.peer.plan, sending.used
        if used is None:
            return
        pages = self._engine.engine.pages.tensor
        try:
            num_bytes = 0
            for push in plan.pushes(pages, layers, block_ids, order, start, end):
                num_bytes += used.connector.push_layers(
                    order.transfer_id, push.layers, push.source, push.source_rows, push.blocks
                )
            sending.num_bytes += num_bytes
            if num_bytes:
                sending.timeline.push(layers, end, computed, num_bytes)
            sending.pushed_tokens[layers.start : layers.stop] = [end] * len(layers)
            sending.block_ids = block_ids
        except Exception as error:  # also what torch and a device raise: the step is for others, too
            sending.used = None
            failure = error if isinstance(error, ConnectorError) else ConnectorError(repr(error))
            self._loop.call_soon_threadsafe(self._push_failed, sending, used, failure)

    def _progressed(self, sending: Sending) -> None:
        num_layers = self._engine.engine.kv_cache.spec.num_layers
        self._carry_out(sending, sending.machine.progress(sending.timeline.record.bytes, num_layers))

    def _hangs(self, now: float) -> bool:
        """Whether the engine has stopped computing, so that its peers had better not wait."""
        return now - max(self._engine.last_progress, self._layer_at) > HANG_SECONDS

    def _complete(self, sending: Sending) -> None:
        """All is there that is to be pushed."""
        sending.computed = True
        self._start(sending, self._see_out(sending))

    def _push_missing(self, sending: Sending) -> list[int]:
        """Engine thread: pushes a part of what is complete and not pushed yet; returns the blocks of all."""
        engine, total = self._engine.engine, sending.to_send.num_tokens
        blocks = engine.held_blocks(sending.machine.transfer_id)
        spec = engine.kv_cache.spec
        at_once = max(1, _BYTES_AT_ONCE // (spec.ranks * spec.block_bytes)) * spec.block_size
        for pushed, group in groupby(range(spec.num_layers), sending.pushed_tokens.__getitem__):
            run = list(group)
            if blocks and pushed < total:  # there are none any more if the request was aborted meanwhile
                layers, end = range(run[0], run[-1] + 1), min(total, pushed + at_once)
                self._push(sending, blocks, layers, pushed, end, time.monotonic())
                break
        return blocks

    async def _see_out(self, sending: Sending) -> None:
        """After the last step of a prompt: what is left to push, flush, checksums, Done."""
        key, chosen = sending.machine.transfer_id, sending.chosen
        engine = self._engine.engine

        def is_over() -> bool:
            state = sending.machine.state
            return sending.switching or sending.chosen is not chosen or state is not SenderState.PREFILLING

        def flush_and_sum(blocks: list[int]) -> list[int]:
            chosen.connector.flush(key)
            return sending.peer.plan.checksums(engine.pages.tensor, blocks, sending.to_send, self.sums)

        if is_over() or sending.seen_out is chosen:
            return
        sending.seen_out = chosen
        blocks = list(sending.block_ids)
        while min(sending.pushed_tokens, default=0) < sending.to_send.num_tokens:
            blocks = await self._engine.call(partial(self._push_missing, sending))  # between two steps
            if is_over():
                return
            if not blocks:
                break
        try:
            checksums = await asyncio.to_thread(flush_and_sum, blocks)
        except ConnectorError as error:
            self._push_failed(sending, chosen, error)
        else:
            if not is_over():
                sending.timeline.mark("sent", chosen.connector.condition())
                now = time.monotonic()
                pushed = sending.machine.pushed(checksums, sending.num_bytes, now, now - sending.computed_at)
                self._carry_out(sending, pushed)

    def _start(self, sending: Sending, work: Awaitable[None]) -> None:
        """Does a part of a transfer. Whatever it raises, the transfer ends, and its receiver does not wait for it."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                log.exception("a KV transfer failed", request=sending.machine.transfer_id)
                self._carry_out(sending, sending.machine.failed(repr(error)))

        self._loop.create_task(run())

    # Connectors that fail

    def _push_failed(self, sending: Sending, failed: Chosen, error: ConnectorError) -> None:
        if sending.switching or sending.chosen is not failed:
            return  # it is known
        key = sending.machine.transfer_id
        if isinstance(error, PushRefused):
            log.warning("KV push refused", request=key, reason=str(error))
            self._carry_out(sending, sending.machine.failed(str(error)))
            return
        sending.switching = True
        self._start(sending, self._fall_back(sending, failed, str(error)))

    async def _fall_back(self, sending: Sending, failed: Chosen, reason: str) -> None:
        """Lets the transfer go on over another connector, or fail."""
        key = sending.machine.transfer_id

        def stop() -> None:
            sending.used = None

        await self._engine.call(stop)  # no push is under way any more, and none follows
        await asyncio.to_thread(failed.connector.stop, key)
        if sending.machine.state not in (SenderState.PREFILLING, SenderState.PUSHED):
            return  # it has ended meanwhile: with its peer, as a rule
        try:
            chosen = await asyncio.to_thread(sending.peer.selection.fall_back, failed, reason, sending.tried)
        except ConnectorError as error:
            log.error(
                "KV connector failed, and there is no other", request=key, connector=failed.kind, reason=str(error)
            )
            self._carry_out(sending, sending.machine.failed(str(error)))
            return
        log.warning("KV connector failed", request=key, connector=failed.kind, reason=reason, next=chosen.kind)
        self._metrics.connector_fallbacks.labels(failed.kind, chosen.kind).inc()
        self._switch(sending, chosen, f"{failed.kind} failed: {reason}")

    def _switch(self, sending: Sending, chosen: Chosen, reason: str) -> None:
        """Asks the receiver to take the transfer's bytes from another connector."""
        sending.switching, sending.chosen = True, chosen
        sending.timeline.mark("switch", f"{chosen.kind}: {reason}")
        sending.tried.add(chosen.kind)
        self._carry_out(sending, sending.machine.switch(chosen.kind, reason, time.monotonic()))

    async def _push_again(self, sending: Sending) -> None:
        """The receiver has shut out the connector before."""

        def begin() -> None:
            if sending.machine.transfer_id in self._exports:
                self._use(sending)

        await self._engine.call(begin)
        sending.switching = False
        if sending.computed:
            await self._see_out(sending)

    def _use(self, sending: Sending) -> None:
        """Engine thread: from now on pushes go over the chosen connector, from the first token on."""
        sending.used = sending.chosen
        sending.pushed_tokens, sending.num_bytes = self._nothing_pushed(), 0

    def _nothing_pushed(self) -> list[int]:
        return [0] * self._engine.engine.kv_cache.spec.num_layers

    async def _read(self, peer: Peer, frames: AsyncIterator[transfer_pb2.ReceiverFrame]) -> None:
        try:
            async for frame in frames:
                self._on_frame(peer, opened(frame))
        except DamagedFrame as error:
            self._metrics.refused_frames.labels("control", "damaged").inc()
            log.warning("link ends", peer=peer.incarnation, reason=str(error))
        finally:
            peer.outbox.put_nowait(None)

    def _on_frame(self, peer: Peer, frame: transfer_pb2.ReceiverFrame) -> None:
        message = from_receiver_frame(frame)
        if message is None:
            return
        refusal = self._reason_against(message)
        now = time.monotonic()
        machine, actions = self._transfers.on_message(peer.incarnation, message, now, refusal)
        if isinstance(message, Renew) and self._hangs(now):
            return
        if machine is None:
            if refusal is None:
                self._metrics.refused_frames.labels("control", "unknown").inc()
            for action in actions:
                if isinstance(action, tx.Reply):
                    peer.outbox.put_nowait(to_sender_frame(action.message))
            return
        sending = self._sending.get(machine.transfer_id)
        if sending is not None:
            self._carry_out(sending, actions)
            return
        peer.improve()
        chosen = peer.selection.current
        expected = machine.order.connector
        timeline = self._timelines.open(machine.transfer_id, peer.incarnation, sends=True)
        timeline.record.connector = chosen.kind
        timeline.mark("ordered")
        tried = {expected, chosen.kind}
        sending = Sending(machine, machine.order, peer, tried, chosen, timeline, now)
        self._sending[machine.transfer_id] = sending
        sending.switching = chosen.kind != expected
        self._carry_out(sending, actions)
        if sending.switching:
            self._switch(sending, chosen, f"{chosen.kind} is in use {chosen.reason}")

    def _reason_against(self, message: ToSender) -> str | None:
        """Why no transfer may begin with this message."""
        if self.draining or self.asleep:
            return f"the sender is {'draining' if self.draining else 'asleep'}"
        if message.transfer_id in self._sending:
            return "another receiver's transfer has this id"
        if not isinstance(message, Order):
            return None
        if message.request.request_id != message.transfer_id:
            return f"the order {message.transfer_id!r} is for another request, {message.request.request_id!r}"
        if message.cached_only != message.transfer_id.endswith(FETCH):
            return f"{message.transfer_id!r} could be a request of this worker: ids of fetches alone end with {FETCH!r}"
        if message.request.block_hashes and not message.cached_only:
            return "what is known by its hashes alone cannot be computed"
        if not message.cached_only and self._engine.engine.on_layers is None:
            return "the sender computes no prompts for others"
        return None

    def _carry_out(self, sending: Sending, actions: list[tx.SenderAction]) -> None:
        engine, key = self._engine.engine, sending.machine.transfer_id
        for action in actions:
            match action:
                case tx.Reply(message):
                    sending.peer.outbox.put_nowait(to_sender_frame(message))
                case tx.Begin():
                    self._engine.post(lambda: self._begin(key, sending))
                    if (source := sending.to_send.source) is not None:
                        self._start(sending, self._receiver.fetch(sending.to_send.request, source, hold=True))
                case tx.StopPushing():
                    sending.timeline.mark("stopping")
                    self._loop.create_task(self._stop(sending))
                case tx.GiveUpConnector(reason):
                    self._push_failed(sending, sending.chosen, ConnectorError(reason))
                case tx.PushAgain():
                    self._start(sending, self._push_again(sending))
                case tx.Release():
                    sending.timeline.mark("source freed")
                    self._exports.pop(key, None)
                    self._engine.post(partial(engine.release, key, copied=sending.machine.moved))
        if sending.machine.closed:
            self._sending.pop(key, None)
            self._receiver.notes.forget(key)  # of what was fetched for it
            self._transfers.forget_closed(sending.peer.incarnation, sending.machine, time.monotonic())

    def _begin(self, key: str, sending: Sending) -> None:
        """Engine thread."""
        order = sending.to_send
        self._exports[key] = sending
        if not sending.switching:
            self._use(sending)
        try:
            if order.cached_only:
                self._hold_cached(sending)
                return
            if order.source is None:  # else the fetch adds it, behind what it brings
                self._engine.engine.add(order.request, hold=True)
            sending.entered = True
        except ValueError as error:
            failed = partial(sending.machine.failed, str(error))
            self._loop.call_soon_threadsafe(lambda: self._carry_out(sending, failed()))

    def _hold_cached(self, sending: Sending) -> None:
        """Engine thread. Raises ValueError if nothing is cached that the receiver could use."""
        sending.computed_at = time.monotonic()
        if sending.to_send.request.block_hashes and not sending.peer.plan.is_identity:
            raise ValueError("the receiver's blocks have other hashes")
        num_tokens = self._engine.engine.hold_cached(sending.to_send.request)
        sending.entered = num_tokens > 0
        cut = sending.peer.plan.leading(sending.to_send, num_tokens)
        if cut is None:
            raise ValueError("no more of it is cached than the receiver has")
        sending.to_send = cut
        self._push_missing(sending)  # the first part at once: another call may have to wait for a step
        self._loop.call_soon_threadsafe(self._complete, sending)

    async def _stop(self, sending: Sending) -> None:
        """Pushes run on the engine thread: after a call there, none is under way and none follows."""
        engine, key = self._engine.engine, sending.machine.transfer_id

        def stop() -> Chosen:
            used, sending.used = sending.used, None
            self._exports.pop(key, None)
            if sending.entered:
                engine.abort(key)
            return used or sending.chosen

        if sending.to_send.source is not None:
            self._receiver.abort(key, "the prompt is not wanted any more")
        used = await self._engine.call(stop)
        await asyncio.to_thread(used.connector.stop, key)
        self._carry_out(sending, sending.machine.stopped())
