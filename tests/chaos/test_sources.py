"""Orders for prompts whose beginning a third worker has: the prefill worker fetches it, and computes what follows."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest
from chaos.faults import Faults, dice
from chaos.load import Load
from chaos.mock_engine import BLOCK
from chaos.pair import LEASE_SECONDS, PATIENT, Pair, Prefill, linked

from kv_transfer.connectors.tcp_sender import TcpSender
from services.rpc import router_pb2, worker_pb2

PROMPT = [43 * number for number in range(40 * BLOCK)]  # whose fetch may take longer than a lease
CACHED = 30 * BLOCK


@contextlib.asynccontextmanager
async def holder() -> AsyncIterator[Prefill]:
    """A worker that has the first `CACHED` tokens."""
    worker = Prefill(lambda layout, _, offer: TcpSender(offer, layout, b""), None, BLOCK, lambda error: None)
    await worker.start()
    try:
        await worker.cache(PROMPT[:CACHED])
        yield worker
    finally:
        await worker.stop()


async def submit(pair: Pair, source: Prefill) -> None:
    at = router_pb2.Endpoint(name="holder", incarnation=source.incarnation, address=source.rpc.address)
    prefix = router_pb2.PrefixSource(worker=at, tokens=len(PROMPT))
    await pair.submit("q0", PROMPT, 2, prefill=pair.endpoint, source=prefix)


def counted(pair: Pair) -> tuple[dict[str, int], dict[str, int]]:
    """Fetches of the prefill worker and transfers to the decode worker, by outcome."""
    both = []
    for counter in (pair.prefill.metrics.fetches, pair.decode.metrics.transfers):
        samples = next(iter(counter.collect())).samples
        both.append({s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total") and s.value})
    return both[0], both[1]


async def test_the_prefill_worker_fetches_first() -> None:
    async with linked("shared_memory", Faults(dice(1), {})) as pair, holder() as source:
        await submit(pair, source)
        assert not any((await Load(pair).settled()).values())
        assert counted(pair) == ({"committed": 1}, {"committed": 1})
        assert pair.prefill.metrics.fetched_blocks._value.get() == CACHED // BLOCK


@pytest.mark.parametrize("what", ["the source is lost", "the client leaves", "the lease ends"])
async def test_what_happens_during_the_fetch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = LEASE_SECONDS if what == "the lease ends" else PATIENT
    async with linked("shared_memory", Faults(dice(2), {}), lease_seconds=lease) as pair, holder() as source:
        goes_on = threading.Event()
        source.thread.post(goes_on.wait)
        try:
            await submit(pair, source)
            while "q0/0/0/fetch" not in pair.prefill.receiver._transfers:
                await asyncio.sleep(0.001)
            match what:
                case "the source is lost":
                    link = await pair.prefill.receiver._links.to(
                        router_pb2.Endpoint(incarnation=source.incarnation, address=source.rpc.address)
                    )
                    link.call.cancel()
                    expected = {"lost": 1}, {"committed": 1}
                case "the client leaves":
                    await pair.worker.Abort(worker_pb2.AbortRequest(request_id="q0"), timeout=10)
                    expected = {"aborted": 1}, {"aborted": 1}
                case "the lease ends":
                    monkeypatch.setattr(pair.decode.receiver, "tick", lambda now: None)
                    expected = {"aborted": 1}, {"recomputed": 1}
            async with asyncio.timeout(20):
                while pair.decode.service.admitted or pair.prefill.sender.num_transfers:
                    await asyncio.sleep(0.002)
            assert counted(pair) == expected
        finally:
            goes_on.set()
        monkeypatch.undo()
        assert not any((await Load(pair).settled()).values()) and not pair.crashes
        while source.sender.num_transfers:
            await asyncio.sleep(0.002)
        assert not await source.thread.call(lambda: source.engine.held_blocks_of_anybody)
