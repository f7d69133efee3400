"""KV transfers under faults: every request ends, with the right tokens, and no block stays behind."""

import asyncio
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from chaos.faults import HEAVY, KINDS, Faults, Rates, dice, everywhere
from chaos.faulty_sender import FaultySender
from chaos.load import Load, Outcome
from chaos.mock_engine import BLOCK, reference
from chaos.pair import CONNECTORS, LEASE_SECONDS, PATIENT, linked, without_checksums
from optional import needs_nixl
from prometheus_client import generate_latest

from engine.engine import Reservation
from engine.request import Request
from kv_transfer import plan
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ConnectorError, PushRefused, SenderConnector
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import ZmqSender
from kv_transfer.messages import Order, PrefixSource
from kv_transfer.references import BlockRef
from services.rpc import router_pb2, trace_pb2
from services.worker import links, receiving, sending
from services.worker.timelines import Timeline

PAIRS = ["gloo", pytest.param("nixl", marks=needs_nixl)]  # headers over a stream, payloads over another way


async def run(
    connector: str,
    faults: Faults,
    requests: int,
    *,
    fenced: bool = True,
    abort_share: float = 0.1,
    prefill_block_size: int = BLOCK,
    least: int = 0,
) -> Outcome:
    async with linked(connector, faults, fenced=fenced, prefill_block_size=prefill_block_size) as pair:
        return await Load(pair, abort_share=abort_share).run(requests, until=lambda: faults.total >= least)


@pytest.mark.parametrize("connector", [*CONNECTORS, *PAIRS])
async def test_without_faults_all_kv_is_transferred(connector: str) -> None:
    async with linked(connector, Faults(dice(1), {})) as pair:
        outcome = await Load(pair, abort_share=0).run(40)
        committed = pair.decode.metrics.transfers.labels("committed")._value.get()
    assert outcome.clean and outcome.ends == {"ended": 40}, outcome
    assert committed == 40


@pytest.mark.parametrize("connector", [*CONNECTORS, *PAIRS])
async def test_random_faults_change_no_token_and_leave_no_block(connector: str) -> None:
    faults = Faults(dice(2), everywhere())
    outcome = await run(connector, faults, 200, least=50)
    assert outcome.clean, outcome
    assert faults.total >= 50, faults.happened
    assert {kind for (kind,) in faults.by(1)} >= set(KINDS) - set(HEAVY)


@pytest.mark.parametrize(("connector", "block_size"), [("shared_memory", 3), ("tcp", 7)])
async def test_random_faults_between_blocks_of_other_sizes(connector: str, block_size: int) -> None:
    faults = Faults(dice(6), everywhere())
    outcome = await run(connector, faults, 100, prefill_block_size=block_size, least=50)
    assert outcome.clean, outcome
    assert faults.total >= 50, faults.happened


async def test_without_checksums_damaged_bytes_are_found_out() -> None:
    """Negative control."""
    with without_checksums():
        outcome = await run("shared_memory", Faults(dice(3), {"push": Rates.only("corrupt", 0.1)}), 30)
    assert outcome.wrong_tokens


async def test_without_fencing_late_writes_are_found_out() -> None:
    """Negative control."""
    faults = Faults(dice(4), {"push": Rates.only("replay", 0.3)})
    outcome = await run("shared_memory", faults, 60, fenced=False)
    assert outcome.wrong_tokens


async def test_abort_in_the_instant_in_which_the_order_goes_out() -> None:
    """The blocks stay with the writer until it has stopped, and are freed once."""
    async with linked("shared_memory", Faults(dice(5), {})) as pair:
        load = Load(pair)
        for number in range(20):
            key = f"q{number}/0"
            await load.submit(f"q{number}", reply_to="tcp://127.0.0.1:1")
            while key not in pair.decode.receiver._transfers:
                await asyncio.sleep(0)
            pair.decode.service.abort(key, "test")
            assert pair.states(key)[0] == "aborting"
        assert not any((await load.settled()).values())
        assert not pair.crashes


@pytest.mark.parametrize("place", ["order", "answer"])
async def test_a_damaged_frame_ends_the_link_and_changes_no_token(place: str) -> None:
    """A bit of a prompt, of a first token or of nothing that can be read: no checksum of KV bytes would tell."""
    faults = Faults(dice(6), {place: Rates.only("corrupt", 0.2)})
    outcome = await run("shared_memory", faults, 100, abort_share=0)
    assert outcome.clean, outcome
    assert faults.by(0, 1)[(place, "corrupt")] > 5


@pytest.mark.parametrize("connector", [*CONNECTORS, *PAIRS])
@pytest.mark.parametrize("place", ["order", "answer", "bytes"])
@pytest.mark.parametrize("kind", ["half-open", "corrupt", "swallow"])
async def test_a_broken_link_heals_alone(connector: str, place: str, kind: str) -> None:
    """After the last fault KV is transferred again, without a restart of anybody. What is swallowed stays so."""
    if (connector, place) == ("shared_memory", "bytes"):
        pytest.skip("there is no stream")
    faults = Faults(dice(7), {place: Rates.only(kind, 0.5)})
    async with linked(connector, faults) as pair:
        load = Load(pair, abort_share=0)
        assert (await load.run(20)).clean
        assert faults.total
        committed = pair.decode.metrics.transfers.labels("committed")._value
        asked, ends = 20, time.monotonic() + 60
        while True:
            before, asked = committed.get(), asked + 8
            assert (await load.run(asked)).clean
            if committed.get() == before + 8:
                break
            assert time.monotonic() < ends, "the link does not heal"
            await asyncio.sleep(0.1)


async def test_a_peer_that_never_answers_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that hangs holds up its own requests alone; these are computed here when it is given up."""
    hole = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = hole.sockets[0].getsockname()[1]
    async with hole, linked("shared_memory", Faults(dice(8), {})) as pair:
        monkeypatch.setattr(links, "_CONNECT_SECONDS", 4.0)
        load, silent = (
            Load(pair, abort_share=0),
            router_pb2.Endpoint(name="silent", incarnation="e" * 32, address=f"127.0.0.1:{port}"),
        )
        await load.submit("q1000", "tcp://127.0.0.1:1", silent)
        await asyncio.gather(*(load.submit(f"q{number}", "tcp://127.0.0.1:1") for number in range(10)))
        receiver = pair.decode.receiver
        while set(pair.decode.service.admitted) != {"q1000/0"}:
            assert "q1000/0" in receiver._starting, "the others waited for it"
            await asyncio.sleep(0.01)
        assert pair.decode.metrics.transfers.labels("committed")._value.get() == 10
        assert not any((await load.settled()).values())


@pytest.mark.parametrize("lands", [True, False])
async def test_the_first_token_does_not_wait_for_the_kv(lands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at the gateway while bytes are under way; if these are lost, no token is repeated with another value."""
    way, flush = threading.Event(), FaultySender.flush

    def flush_later(sender: FaultySender, transfer_id: str) -> None:
        assert way.wait(20)
        if not lands:
            raise PushRefused("the way is cut")
        flush(sender, transfer_id)

    monkeypatch.setattr(FaultySender, "flush", flush_later)
    async with linked("tcp", Faults(dice(9), {})) as pair:
        load = Load(pair, abort_share=0)
        running = asyncio.create_task(load.run(1))
        while not (load._asked and load._asked["q1"].seen):
            assert not running.done()
            await asyncio.sleep(0.01)
        asked, transfers = load._asked["q1"], pair.decode.metrics.transfers
        assert asked.seen == {0} and len(asked.expected) > 1
        assert transfers.labels("committed")._value.get() == 0 and "q1/0" in pair.decode.receiver._transfers
        way.set()
        outcome = await running
        assert outcome.clean and outcome.ends == {"ended": 1}, outcome
        assert transfers.labels("committed" if lands else "recomputed")._value.get() == 1


async def test_the_same_order_twice_is_one_transfer() -> None:
    """It must not be refused: the receiver would take that for the word that nobody writes."""
    faults = Faults(dice(9), {"order": Rates.only("duplicate")})
    async with linked("shared_memory", faults, lease_seconds=PATIENT) as pair:
        outcome = await Load(pair, abort_share=0).run(40)
        committed = pair.decode.metrics.transfers.labels("committed")._value.get()
    assert outcome.clean and committed == 40, outcome
    assert faults.total >= 40


class Rogue(SenderConnector):
    """Remembers the last push and can do it again with other bytes, as the next frames of its transfer."""

    def __init__(self, sender: SenderConnector) -> None:
        assert isinstance(sender, FaultySender)
        self.counters = sender.counters
        self.wrote = 0
        self._inner = sender._inner
        self._last: tuple[str, int, torch.Tensor, Sequence[BlockRef]] | None = None
        # Where sequence numbers are kept; without the next ones its frames would be taken for old ones.
        self._ends: list[Any] = [self._inner] if isinstance(self._inner, ZmqSender) else []
        if isinstance(self._inner, TcpSender):
            self._ends = list(self._inner._streams)
        self._next: list[dict[str, int]] = []

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        self._last = (transfer_id, layer, source[list(source_blocks)] + 1, blocks)
        return self._inner.push(transfer_id, layer, source, source_blocks, blocks)

    def write_again(self) -> None:
        """Returns when the bytes are there, or would be."""
        assert self._last is not None
        transfer_id, layer, source, blocks = self._last
        for end, sequences in zip(self._ends, self._next, strict=True):
            end._sequences.update(sequences)
        with contextlib.suppress(ConnectorError):
            self._inner.push(transfer_id, layer, source, range(len(blocks)), blocks)
            self.flush(transfer_id)
        self.wrote += 1
        time.sleep(0.02)

    def flush(self, transfer_id: str) -> None:
        while any(end._is_pending(transfer_id) for end in self._ends):
            time.sleep(0.001)
        self._next = [dict(end._sequences) for end in self._ends]
        self._inner.flush(transfer_id)

    def stop(self, transfer_id: str) -> None:
        self._inner.stop(transfer_id)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_bytes_that_come_after_the_comparison_are_not_written(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that goes on after its Done, in the moment in which the receiver has found everything right."""
    async with linked(connector, Faults(dice(10), {})) as pair:
        rogues: list[Rogue] = []

        def open_connector(layout: str, kind: str, description: bytes) -> SenderConnector:
            rogues.append(Rogue(pair._open_connector(layout, kind, description)))
            return rogues[-1]

        def sums(pages: torch.Tensor, rows: Sequence[int]) -> list[int]:
            found = []
            for row in rows:
                found += page_sums(pages, [row])
                rogues[-1].write_again()
            return found

        monkeypatch.setattr(pair.prefill.sender._handshakes, "_open_connector", open_connector)
        monkeypatch.setattr(receiving, "page_sums", sums)
        outcome = await Load(pair, abort_share=0).run(12, at_once=1)
        committed = pair.decode.metrics.transfers.labels("committed")._value.get()
    assert outcome.clean and committed == 12, outcome
    assert rogues[-1].wrote >= 12


async def test_a_link_that_breaks_while_its_request_waits_for_room_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked("shared_memory", Faults(dice(11), {})) as pair:
        receiver, load = pair.decode.receiver, Load(pair, abort_share=0)
        room = receiver._room.reserve

        async def reserve(request: Request, timeline: Timeline, source: PrefixSource | None) -> Reservation:
            reservation = await room(request, timeline, source)
            link = receiver._links._links[pair.prefill.incarnation].result()
            link.call.cancel()
            assert link.reader is not None
            await link.reader
            return reservation

        monkeypatch.setattr(receiver._room, "reserve", reserve)
        await load.submit("q0", "tcp://127.0.0.1:1")
        assert not any((await load.settled()).values())
        assert pair.decode.metrics.transfers.labels("committed")._value.get() == 1


async def test_the_end_of_a_stream_is_told_although_the_next_could_not_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked("shared_memory", Faults(dice(12), {})) as pair:
        known = pair.decode.receiver._links
        lost: list[links.Link] = []
        monkeypatch.setattr(known, "_on_lost", lost.append)
        link = await known.to(pair.endpoint)
        known._forget(link)
        monkeypatch.setattr(links, "_CONNECT_SECONDS", 0.0)
        with pytest.raises(links.LinkLost):
            await known.to(pair.endpoint)
        link.call.cancel()
        assert link.reader is not None
        await link.reader
        assert lost == [link] and link.outbox.get_nowait() is None


async def test_a_stream_that_ends_in_the_handshake_leaves_no_connector_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked("tcp", Faults(dice(12), {})) as pair:
        opened: list[FaultySender] = []

        def slowly(layout: str, kind: str, description: bytes) -> SenderConnector:
            time.sleep(0.1)
            opened.append(pair._open_connector(layout, kind, description))  # type: ignore[arg-type]
            return opened[-1]

        monkeypatch.setattr(pair.prefill.sender._handshakes, "_open_connector", slowly)
        tries = (0.02, 0.05, 0.1, 0.11, 0.12, 0.13)  # some while it is opened, some while the answer is on its way
        for seconds in tries:
            monkeypatch.setattr(links, "_CONNECT_SECONDS", seconds)
            with contextlib.suppress(links.LinkLost):
                link = await pair.decode.receiver._links.to(pair.endpoint)
                link.call.cancel()
                await asyncio.sleep(0.05)
        ends = time.monotonic() + 60
        while len(opened) < len(tries) // 2 or not all(sender._closed for sender in opened):
            assert time.monotonic() < ends, [sender._closed for sender in opened]
            await asyncio.sleep(0.01)


async def test_what_is_damaged_or_stale_is_counted_by_kind() -> None:
    """In the worker's metrics."""
    rates = Rates({"duplicate": 0.2, "replay": 0.2, "corrupt": 0.01})
    faults = Faults(dice(13), {"order": rates, "answer": rates, "bytes": Rates.of(0.1, 0.02)})
    async with linked("tcp", faults) as pair:
        load, asked, ends = Load(pair), 0, time.monotonic() + 30
        refused = pair.decode.connector.counters.refused
        while True:
            asked, faults.quiet = asked + 80, False
            assert (await load.run(asked)).clean
            texts = [generate_latest(worker.metrics.registry).decode() for worker in (pair.decode, pair.prefill)]
            control = [
                float(re.findall(f'tandem_kv_refused_frames_total{{connector="control",kind="{kind}"}} (.*)', text)[0])
                for kind in ("damaged", "unknown")
                for text in texts
            ]
            if all(control) and refused:
                break
            assert time.monotonic() < ends, (control, refused)
    text = generate_latest(pair.decode.metrics.registry).decode()  # now that nothing late can come any more
    for kind, count in refused.items():
        assert f'tandem_kv_refused_frames_total{{connector="tcp",kind="{kind}"}} {count}.0' in text


async def test_a_peer_that_cannot_be_reached_is_not_tried_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One handshake fails; the prompts that come in the pause after it are computed here at once."""
    hole = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = hole.sockets[0].getsockname()[1]
    silent = router_pb2.Endpoint(name="silent", incarnation="e" * 32, address=f"127.0.0.1:{port}")
    async with hole, linked("shared_memory", Faults(dice(10), {})) as pair:
        monkeypatch.setattr(links, "_CONNECT_SECONDS", 0.3)
        monkeypatch.setattr(links, "_PAUSE_SECONDS", 60.0)
        receiver, tries = pair.decode.receiver, Counter[str]()
        shake_hands = receiver._links._shake_hands

        async def count(peer: router_pb2.Endpoint, *others: Any) -> links.Link:
            tries[peer.name] += 1
            return await shake_hands(peer, *others)

        monkeypatch.setattr(receiver._links, "_shake_hands", count)
        load = Load(pair, abort_share=0)
        for number in range(5):
            await load.submit(f"q{number}", "tcp://127.0.0.1:1", silent)
            while pair.decode.service.admitted:
                await asyncio.sleep(0.01)
        assert tries["silent"] == 1
        assert pair.decode.metrics.transfers.labels("recomputed")._value.get() == 5
        receiver._links._try_again_at["e" * 32] = 0.0  # the pause is over
        await load.submit("q5", "tcp://127.0.0.1:1", silent)
        assert not any((await load.settled()).values())
        assert tries["silent"] == 2


async def test_an_engine_that_hangs_renews_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill worker answers, but computes nothing: prompts are computed elsewhere, long before their deadline."""
    monkeypatch.setattr(sending, "HANG_SECONDS", 0.3)
    async with linked("tcp", Faults(dice(14), {}), lease_seconds=LEASE_SECONDS) as pair:
        load, goes_on = Load(pair, abort_share=0), threading.Event()
        pair.prefill.thread.post(lambda: goes_on.wait(30))
        try:
            for number in range(4):
                await load.submit(f"q{number}", "tcp://127.0.0.1:1")
            while pair.decode.service.admitted:
                await asyncio.sleep(0.01)
        finally:
            goes_on.set()
        reply = await pair.decode.timelines.Timelines(trace_pb2.TimelinesRequest(request="q0"), None)  # type: ignore[arg-type]
        (reason,) = [mark.detail for mark in reply.timelines[0].marks if mark.event == "recomputed"]
        assert reason != "deadline exceeded"
        assert not any((await load.settled()).values())


async def test_a_request_that_moved_to_where_its_output_is_cached() -> None:
    """More blocks are cached than the prompt has: the rest comes, and the worker goes on."""
    prompt = [7, 8, 9, 10]
    output = reference(prompt, 40)
    async with linked("shared_memory", Faults(dice(14), {})) as pair:
        for number, known in enumerate((0, 30)):
            await pair.submit(f"q{number}", prompt, 40, prefill=pair.endpoint, output_token_ids=output[:known])
            assert not any((await Load(pair).settled()).values())
        assert not pair.crashes
        assert pair.decode.metrics.transfers.labels("committed")._value.get() == 2
        assert pair.decode.metrics.prompt_tokens.labels("transferred")._value.get() == len(prompt)


@pytest.mark.parametrize("where", ["push", "sums of the sender", "sums of the receiver"])
async def test_what_a_device_raises_costs_a_transfer_and_no_request(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[int]:
        raise RuntimeError("out of memory")

    owner, name = {
        "push": (plan.TransferPlan, "pushes"),
        "sums of the sender": (plan.TransferPlan, "checksums"),
        "sums of the receiver": (receiving, "page_sums"),
    }[where]
    async with linked("shared_memory", Faults(dice(13), {})) as pair:
        monkeypatch.setattr(owner, name, broken)
        outcome = await Load(pair, abort_share=0).run(6, at_once=2)
        recomputed = pair.decode.metrics.transfers.labels("recomputed")._value.get()
    assert outcome.clean and recomputed == 6, outcome


async def test_an_order_for_another_request_is_refused() -> None:
    async with linked("shared_memory", Faults(dice(14), {})) as pair:
        receiver = pair.decode.receiver
        send = receiver._send

        def send_for_another(link: links.Link, message: object) -> None:
            if isinstance(message, Order):
                request = msgspec.structs.replace(message.request, request_id="another/0")
                message = msgspec.structs.replace(message, request=request)
            send(link, message)  # type: ignore[arg-type]

        receiver._send = send_for_another  # type: ignore[method-assign, assignment]
        outcome = await Load(pair, abort_share=0).run(4, at_once=2)
        recomputed = pair.decode.metrics.transfers.labels("recomputed")._value.get()
    assert outcome.clean and recomputed == 4, outcome
