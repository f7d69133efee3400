"""The receiving side of KV transfers: orders prompts, or what is cached of them, from peers, and has the engine use it.

Carries out what `kv_transfer.receiver` decides. Everything here runs on the event loop; the engine is called through
its thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from engine.engine import Reservation
from engine.request import TIERS, Request
from engine.scheduler import NothingToFetch
from kv_transfer import receiver as rx
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ReceiverConnector
from kv_transfer.messages import FETCH, Done, FirstToken, Order, PrefixSource, Switch, ToSender
from kv_transfer.references import BlockRef
from kv_transfer.states import ReceiverState
from services import tracing
from services.rpc import router_pb2, transfer_pb2
from services.security import ClusterKey
from services.worker.engine_thread import EngineThread
from services.worker.incoming import Prefix, Receiving, prefix_order, references
from services.worker.links import Link, LinkLost, Links
from services.worker.metrics import WorkerMetrics
from services.worker.notes import Notes
from services.worker.prefix_costs import PrefixCosts
from services.worker.room import Room
from services.worker.timelines import Timeline, Timelines
from services.worker.transfer_wire import from_sender_frame, to_receiver_frame

log = structlog.get_logger()

_LEASE_SECONDS = 5.0
_LATE_BYTES_SECONDS = 5.0  # without another byte after the word that all were sent: the rest will not come
_POLL_SECONDS = 0.001
_TIMER_SECONDS = 0.001  # a timer may go off so much before its time
_NO_FAILURES = (rx.TOO_LATE, rx.UNHEARD)  # reasons for which a prefill worker that delivers is left
_FETCH_OUTCOMES = {rx.TOO_LATE: "late", rx.DAMAGED: "damaged"}  # of failures, by reason


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
        costs: PrefixCosts,
    ) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._connectors = {connector.capabilities.kind: connector for connector in connectors}  # best first
        self._metrics = metrics
        self._timelines = timelines
        self._costs = costs
        self._starting: dict[str, asyncio.Task[None]] = {}  # requests that have no transfer yet
        self._transfers: dict[str, Receiving] = {}  # by transfer id
        # Fetches under way. True: it came, or would not come for others, either; False: its request was aborted.
        self._fetching: dict[Prefix, asyncio.Future[bool]] = {}
        hello = transfer_pb2.ReceiverHello(incarnation=incarnation, name=name, fingerprint=fingerprint, layout=layout)
        self._fetches = itertools.count()
        self.notes = Notes()
        self.on_verified: Callable[[Sequence[BlockRef], Sequence[int]], None] = lambda blocks, sums: None
        self._links = Links(hello, self._connectors, key, metrics, self._on_frame, self._on_link_lost)
        self._room = Room(engine, metrics, key)
        for connector in connectors:
            metrics.watch(connector.capabilities.kind, connector.counters)

    @property
    def can_fetch(self) -> bool:
        """Whether peers have a way into this worker's pool."""
        return bool(self._connectors)

    def start(
        self, request: Request, prefill: router_pb2.Endpoint, reply_to: str, source: PrefixSource | None = None
    ) -> None:
        """Has `prefill` compute the request's prompt; falls back to computing it here.

        `source`: where `prefill` may fetch leading blocks before.
        """
        self._begin(request, self._start(request, prefill, reply_to, source))

    def fetch(self, request: Request, source: PrefixSource, *, hold: bool = False) -> asyncio.Task[None]:
        """Has the request computed here, behind what comes from `source` sooner than it could be computed.

        `hold` as for `Engine.add`. The task ends when the source is asked, or the request computed without; it raises
        ValueError for an id that is in use.
        """
        reserve = partial(self._engine.engine.reserve, request, prefix_tokens=source.tokens, hold=hold)
        compute = partial(self._compute, request, hold, source.tokens if source.tier else 0)
        return self._begin(request, self._fetch(request, source, reserve, compute))

    def fetch_again(self, request: Request, source: PrefixSource) -> None:
        """As `fetch`, what a preempted request had: one of `Step.fetches`, with its answer so far."""
        engine, key = self._engine.engine, request.request_id
        work = self._fetch(request, source, partial(engine.reserved, key), partial(engine.recompute, key))
        self._begin(request, work)

    def _begin(self, request: Request, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        key = request.request_id
        task = self._starting[key] = asyncio.get_running_loop().create_task(work)
        # A transfer that has begun has taken its request out, and a later one may be starting under that id.
        task.add_done_callback(lambda done: self._starting.pop(key) if self._starting.get(key) is done else None)
        return task

    def abort(self, key: str, reason: str) -> bool:
        """Ends the transfer of a request that is not wanted any more. False: there is none, the engine has it."""
        self.notes.forget(key)
        if task := self._starting.get(key):
            task.cancel()
            self._engine.post(lambda: self._engine.engine.abort(key))
            return True
        own = (receiving for receiving in self._transfers.values() if receiving.request_id == key)
        receiving = next((each for each in own if each.machine.state is not ReceiverState.ABORTING), None)
        if receiving is None:
            return False
        self._count(receiving, "aborted")
        self._carry_out(receiving, receiving.machine.abort(reason, time.monotonic()))
        return True

    def blocks_freed(self) -> None:
        """A step ended: the first request that waits for room tries again."""
        self._room.freed()

    def tick(self, now: float) -> None:
        """Leases, deadlines and fencing; several times a second."""
        self._room.freed()
        self._links.tick(now)
        for link in {receiving.link for receiving in self._transfers.values()}:
            if not link.call.done() and self._is_silent(link, now):
                self._links.end(link, "the sender is silent")
        for receiving in list(self._transfers.values()):
            self._tick(receiving)

    def _tick(self, receiving: Receiving) -> None:
        """One transfer; nothing once it is closed."""
        machine, now = receiving.machine, time.monotonic()
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
        await self._links.close()

    def _is_silent(self, link: Link, now: float) -> bool:
        """Whether nothing has come for a lease although transfers wait: who is alive answers renewals and aborts."""
        own = (receiving for receiving in self._transfers.values() if receiving.link is link)
        waiting = [receiving.started for receiving in own if receiving.machine.state is not ReceiverState.VERIFYING]
        return bool(waiting) and now - max(link.heard_at, min(waiting)) >= _LEASE_SECONDS

    # Starting a transfer

    async def _start(
        self, request: Request, prefill: router_pb2.Endpoint, reply_to: str, source: PrefixSource | None
    ) -> None:
        key = request.request_id
        timeline = self._timelines.open(key, prefill.incarnation, sends=False)
        arrived = time.monotonic()
        timeline.mark("arrived", at=arrived)
        try:
            await self._links.to(prefill)  # first: for a peer that is gone nobody has to make room
            timeline.mark("linked", prefill.name)
            reservation = await self._room.reserve(request, timeline, source)
            link = await self._links.to(prefill)  # again: that may have taken long
        except asyncio.CancelledError:
            timeline.mark("aborted")
            raise
        except Exception as error:  # whatever it is, the request can still be computed here
            reason = str(error) or "no room for its KV before its deadline"
            log.warning("prefill goes local", request=key, reason=reason)
            timeline.mark("recomputed", reason)
            self._metrics.transfers.labels("recomputed").inc()
            if isinstance(error, LinkLost):
                self.notes.prefill_failed(key)
            await self._engine.call(partial(self._compute, request))
            return
        now = time.monotonic()
        self.notes.spent(key, "queue", arrived, now)
        tracing.record("queue", request.traceparent, arrived, now, waits_for="blocks")
        order = Order(
            transfer_id=key,
            request=request,
            blocks=references(self._incarnation, self._engine.engine.kv_cache, reservation),
            skip_blocks=reservation.num_cached_blocks,
            reply_to=reply_to,
            lease_seconds=_LEASE_SECONDS,
            connector=link.connector,
            source=source,
        )
        self._order(key, order, link, timeline, request.deadline)

    async def _fetch(
        self,
        request: Request,
        source: PrefixSource,
        reserve: Callable[[], Reservation | None],
        compute: Callable[[], object],
    ) -> None:
        tokens = request.prompt_token_ids + request.output_token_ids
        prefix = request.cache_salt, tuple(request.block_hashes or tokens[: source.tokens])
        outcome: str | None = None
        while outcome is None and (under_way := self._fetching.get(prefix)) is not None:
            outcome = "shared" if await asyncio.shield(under_way) else None
        if outcome is None:
            self._fetching[prefix] = asyncio.get_running_loop().create_future()
            try:
                outcome = await self._order_prefix(request, source, reserve, prefix)
            except BaseException:
                self._over(prefix, False)
                raise
            if outcome is None:
                return
            self._over(prefix, True)
        self._metrics.fetches.labels(outcome).inc()
        if outcome == "no room":
            self._room.read_ahead(request, source)
        await self._engine.call(compute)

    def _compute(self, request: Request, hold: bool = False, elsewhere_tokens: int = 0) -> None:
        """Engine thread: computes it; if nothing is reserved, `elsewhere_tokens` may be fetched once there is room."""
        if not self._engine.engine.recompute(request.request_id):
            self._engine.engine.add(request, hold=hold, elsewhere_tokens=elsewhere_tokens)

    def _over(self, prefix: Prefix, for_all: bool) -> None:
        self._fetching.pop(prefix).set_result(for_all)

    async def _order_prefix(
        self, request: Request, source: PrefixSource, reserve: Callable[[], Reservation | None], prefix: Prefix
    ) -> str | None:
        """Asks `source` for the prefix; None, or what kept it from that."""
        size = self._engine.engine.kv_cache.spec.block_size
        key = request.request_id
        transfer_id = f"{key}/{next(self._fetches)}{FETCH}"  # a request that is preempted may fetch again
        timeline = self._timelines.open(transfer_id, source.incarnation, sends=False)
        arrived = time.monotonic()
        timeline.mark("arrived", at=arrived)
        peer = router_pb2.Endpoint(name=source.name, incarnation=source.incarnation, address=source.address)
        outcome, reason = unreachable = "unreachable", "no link to the source as soon as it could be computed"
        reservation = link = None
        try:
            async with asyncio.timeout(self._costs.computing_seconds(source.tokens)):
                await self._links.to(peer)
            linking = time.monotonic() - arrived
            timeline.mark("linked", source.name)
            outcome, reason = "no room", "no room for it"
            reservation = await self._engine.call(reserve)
            if reservation is not None:
                outcome, reason = unreachable
                missing = len(reservation.block_ids) * size - reservation.num_cached_tokens
                seconds = self._costs.computing_seconds(missing) - linking
                deadline = min(request.deadline, time.monotonic() + seconds)
                if seconds > 0:
                    async with asyncio.timeout(seconds):
                        link = await self._links.to(peer)  # again: it may have ended while the engine was busy
        except asyncio.CancelledError:
            timeline.mark("aborted")
            raise
        except Exception as error:  # whatever it is, the request can still be computed here
            outcome = "cached" if isinstance(error, NothingToFetch) else outcome
            reason = str(error) or reason
        if reservation is None or link is None:
            log.info("a prefix is not fetched", request=key, reason=reason)
            timeline.mark("recomputed", reason)
            return outcome
        tokens = (request.prompt_token_ids + request.output_token_ids)[: len(reservation.block_ids) * size]
        blocks = references(self._incarnation, self._engine.engine.kv_cache, reservation)
        skipped = reservation.num_cached_blocks
        due = msgspec.structs.replace(request, deadline=deadline)
        order = prefix_order(transfer_id, due, tokens, blocks, skipped, link.connector, _LEASE_SECONDS, source.tier)
        receiving = self._order(key, order, link, timeline, deadline, prefix)
        receiving.tier = source.tier
        asyncio.get_running_loop().call_at(deadline + _TIMER_SECONDS, self._tick, receiving)
        return None

    def _order(
        self, key: str, order: Order, link: Link, timeline: Timeline, deadline: float, prefix: Prefix | None = None
    ) -> Receiving:
        now, what = time.monotonic(), "cached prefix" if order.cached_only else "prompt"
        span = tracing.start("transfer", order.request.traceparent, of=what, sender=link.peer.name)
        request = msgspec.structs.replace(order.request, traceparent=span.context)
        order = msgspec.structs.replace(order, request=request)
        machine = rx.ReceiverTransfer(order, deadline=deadline, spare=self._connectors)
        connector = self._connectors[link.connector]
        receiving = Receiving(key, machine, link, connector, order.blocks, timeline, span, now, prefix=prefix)
        timeline.record.connector = link.connector
        timeline.mark("reserved", f"{len(order.blocks)} blocks, {order.skip_blocks} cached")
        connector.expect(order.transfer_id, order.blocks)
        # From here an abort must find the transfer, not a start that could be called off: the writer is about to write.
        del self._starting[key]
        self._transfers[order.transfer_id] = receiving
        self._carry_out(receiving, machine.start(now))
        return receiving

    # Links

    def _on_link_lost(self, link: Link) -> None:
        now = time.monotonic()
        for receiving in [receiving for receiving in self._transfers.values() if receiving.link is link]:
            self._carry_out(receiving, receiving.machine.on_peer_lost(now))
            self._fence(receiving)

    def _on_frame(self, link: Link, frame: transfer_pb2.SenderFrame) -> None:
        receiving = self._transfers.get(frame.transfer_id)
        message = from_sender_frame(frame)
        if message is None:
            return
        if receiving is None or receiving.link is not link:
            self._metrics.refused_frames.labels("control", "unknown").inc()
            for answer in rx.answer_unknown(message):
                self._send(link, answer.message)
            return
        actions = receiving.machine.on_message(message, time.monotonic())
        if isinstance(message, FirstToken):
            receiving.timeline.mark("first token")
            receiving.prefilled(message)
        self._carry_out(receiving, actions)
        if isinstance(message, Switch):
            log.info("KV comes over another connector", request=message.transfer_id, reason=message.reason)
            self._fence(receiving)

    def _send(self, link: Link, message: ToSender) -> None:
        link.outbox.put_nowait(to_receiver_frame(message, time.monotonic()))

    # Actions

    def _carry_out(self, receiving: Receiving, actions: list[rx.Action]) -> None:
        engine = self._engine.engine
        key, transfer_id = receiving.request_id, receiving.machine.transfer_id
        closed = receiving.machine.closed and self._transfers.get(transfer_id) is receiving
        if closed:
            receiving.connector.finish(transfer_id)  # before the blocks are handed to anybody else
        for action in actions:
            match action:
                case rx.Send(message):
                    self._send(receiving.link, message)
                case rx.Verify(done):
                    receiving.landed_at = time.monotonic()
                    receiving.timeline.mark("landed")
                    receiving.tier = done.tier if done.tier in TIERS else receiving.tier
                    asyncio.get_running_loop().create_task(self._verify(receiving, done))
                case rx.Join(token_id, logprob, cached_tokens):
                    receiving.timeline.mark("verified")
                    handoff = partial(engine.commit_handoff, key, token_id, logprob, cached_tokens)
                    self._engine.post(partial(self._commit, receiving, handoff))
                case rx.JoinPrefix(num_pages):
                    receiving.timeline.mark("verified")
                    num_blocks = num_pages // engine.kv_cache.spec.ranks
                    seconds = receiving.landed_at - receiving.started
                    source = self._costs.fetched(receiving.tier)
                    source.came(num_blocks * engine.kv_cache.spec.block_size, seconds)
                    self._engine.post(partial(self._commit_prefix, receiving, num_blocks))
                case rx.Recompute(reason):
                    self._recomputed(receiving, reason, "refused")
                    self._engine.post(partial(engine.recompute, key))
                case rx.Detach(reason, recompute):
                    if recompute:
                        self._recomputed(receiving, reason, "lost")
                    else:
                        receiving.timeline.mark("aborted", reason)
                        receiving.span.end(error=reason)
                    ranks = engine.kv_cache.spec.ranks
                    receiving.quarantine = [ref.block_id for ref in receiving.blocks[::ranks]]
                    self._engine.post(partial(engine.detach, key, then_wait=recompute))
                case rx.Expect(kind):
                    receiving.connector = self._connectors[kind]
                    receiving.connector.expect(transfer_id, receiving.blocks)
                    receiving.link.connector = receiving.timeline.record.connector = kind
                    receiving.timeline.mark("connector", kind)
                case rx.ReleaseBlocks():
                    receiving.timeline.mark("blocks freed", "the writer has stopped or is shut out")
                    blocks, receiving.quarantine = receiving.quarantine, []
                    self._engine.post(partial(engine.release_blocks, blocks))
        if closed:
            del self._transfers[transfer_id]
        if receiving.prefix is not None and (closed or receiving.machine.state is ReceiverState.ABORTING):
            aborted = any(isinstance(action, rx.Detach) and not action.recompute for action in actions)
            self._over(receiving.prefix, not aborted)
            receiving.prefix = None

    def _recomputed(self, receiving: Receiving, reason: str, otherwise: str) -> None:
        """A transfer has failed. `otherwise`: what that counts as for a fetch, where the reason is none of its own."""
        receiving.timeline.mark("recomputed", reason)
        self._spent(receiving, error=reason)
        log.warning("KV transfer failed, the prompt is computed here", request=receiving.request_id, reason=reason)
        if not receiving.fetches:
            self._count(receiving, "recomputed")
            if reason not in _NO_FAILURES:
                self.notes.prefill_failed(receiving.request_id)
            return
        self._count(receiving, _FETCH_OUTCOMES.get(reason, otherwise))
        if reason == rx.TOO_LATE:
            self._costs.fetched(receiving.tier).late(time.monotonic() - receiving.started)

    def _count(self, receiving: Receiving, outcome: str) -> None:
        (self._metrics.fetches if receiving.fetches else self._metrics.transfers).labels(outcome).inc()

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
        self._committed(receiving, len(receiving.blocks))
        order = receiving.machine.order
        skipped = order.skip_blocks * self._engine.engine.kv_cache.spec.block_size
        # Of a request that has moved here, output may be cached as well: then nothing of the prompt was transferred.
        self._metrics.prompt_tokens.labels("transferred").inc(max(0, len(order.request.prompt_token_ids) - skipped))
        self._metrics.transfer_seconds.observe(now - receiving.started)
        self._metrics.exposed_seconds.observe(now - receiving.landed_at + receiving.machine.seconds_since_compute)

    def _commit_prefix(self, receiving: Receiving, num_blocks: int) -> None:
        """Engine thread."""
        engine = self._engine.engine
        landed = receiving.machine.order.skip_blocks + num_blocks
        if not engine.commit_prefix(receiving.request_id, landed, from_tier=bool(receiving.tier)):
            return  # aborted in the meantime
        self._committed(receiving, num_blocks * engine.kv_cache.spec.ranks)
        self._metrics.fetched_blocks.inc(num_blocks)

    def _committed(self, receiving: Receiving, num_pages: int) -> None:
        receiving.timeline.mark("committed")
        self._count(receiving, "committed")
        num_bytes = num_pages * self._engine.engine.kv_cache.spec.block_bytes
        self._spent(receiving, num_bytes)
        receiving.timeline.record.bytes = num_bytes
        self._metrics.landed(receiving.link.peer.incarnation, receiving.connector.capabilities.kind, num_bytes)

    def _spent(self, receiving: Receiving, num_bytes: int = 0, error: str = "") -> None:
        """The transfer is over."""
        self.notes.spent(receiving.request_id, "transfer", receiving.started, time.monotonic())
        for stage in receiving.stages:
            self.notes.spent(receiving.request_id, *stage, elsewhere=True)
        receiving.span.end(error=error, bytes=num_bytes, connector=receiving.connector.capabilities.kind)

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
        # The holder of a prefix may have fewer blocks than were ordered, but not none.
        count = max(1, len(done.checksums)) if receiving.fetches else len(receiving.blocks)
        written = [ref.block_id for ref in receiving.blocks[:count]]
        try:
            ok = await asyncio.to_thread(lambda: page_sums(pages.tensor, written) == done.checksums)
        except Exception:  # also what torch and a device raise: the request goes on without these bytes
            log.exception("KV cannot be compared", request=key)
            ok = False
        if ok:
            self.on_verified(receiving.blocks[:count], done.checksums)
        self._carry_out(receiving, machine.verified(ok, time.monotonic()))
        if is_late and time.monotonic() > late_at and machine.closed:
            self._links.end(link, f"of {done.num_bytes} bytes of KV {landed} came, and there is no other connector")
