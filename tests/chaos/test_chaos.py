"""KV transfers under faults: every request ends, with the right tokens, and no block stays behind."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import pytest
from chaos.faults import HEAVY, KINDS, Faults, Rates, dice, everywhere
from chaos.faulty_sender import FaultySender
from chaos.load import Load, Outcome
from chaos.pair import CONNECTORS, Pair, short_waits, without_checksums

from kv_transfer.connectors.base import PushRefused
from services.rpc import router_pb2
from services.worker import receiving


@contextlib.asynccontextmanager
async def linked(connector: str, faults: Faults, *, fenced: bool = True) -> AsyncIterator[Pair]:
    with short_waits():
        pair = Pair(connector, faults, fenced=fenced)
        await pair.start()
        try:
            yield pair
        finally:
            await pair.stop()


async def run(
    connector: str, faults: Faults, requests: int, *, fenced: bool = True, abort_share: float = 0.1
) -> Outcome:
    async with linked(connector, faults, fenced=fenced) as pair:
        return await Load(pair, abort_share=abort_share).run(requests)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_without_faults_all_kv_is_transferred(connector: str) -> None:
    async with linked(connector, Faults(dice(1), {})) as pair:
        outcome = await Load(pair, abort_share=0).run(40)
        committed = pair.decode.metrics.transfers.labels("committed")._value.get()
    assert outcome.clean and outcome.ends == {"ended": 40}, outcome
    assert committed == 40


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_random_faults_change_no_token_and_leave_no_block(connector: str) -> None:
    faults = Faults(dice(2), everywhere())
    outcome = await run(connector, faults, 200)
    assert outcome.clean, outcome
    assert faults.total > 100, faults.happened
    assert {kind for (kind,) in faults.by(1)} >= set(KINDS) - set(HEAVY)


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


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("place", ["order", "answer", "bytes"])
@pytest.mark.parametrize("kind", ["half-open", "corrupt"])
async def test_a_broken_link_heals_alone(connector: str, place: str, kind: str) -> None:
    """After the last fault KV is transferred again, without a restart of anybody."""
    if (connector, place) == ("shared_memory", "bytes"):
        pytest.skip("there is no stream")
    faults = Faults(dice(7), {place: Rates.only(kind, 0.5)})
    async with linked(connector, faults) as pair:
        load = Load(pair, abort_share=0)
        assert (await load.run(20)).clean
        assert faults.total
        committed = pair.decode.metrics.transfers.labels("committed")._value
        asked, ends = 20, time.monotonic() + 10
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
        monkeypatch.setattr(receiving, "_CONNECT_SECONDS", 4.0)
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
