"""Clients that leave, and requests that are refused, at each state of a transfer: work stops and nothing is left."""

import asyncio
import time

import grpc.aio
import pytest
from chaos.faults import Faults, Rates, dice
from chaos.faulty_sender import FaultySender
from chaos.load import Load
from chaos.mock_engine import BLOCK
from chaos.pair import CONNECTORS, Pair, linked

from engine.request import Request, SamplingParams
from services.rpc import worker_pb2
from services.worker import links

NOWHERE = "tcp://127.0.0.1:1"
STATES = ["linking", "waiting", "reserved", "prefilling", "landing", "verifying", "decoding"]


def take_all_blocks(pair: Pair) -> list[int]:
    """Engine thread: holds the decode worker's whole pool."""
    engine, taken = pair.decode.engine, list[int]()
    for number, blocks in enumerate((engine.kv_cache.num_blocks - 10, 9, 1)):
        tokens = [1 << 25 | number << 20 | i for i in range(blocks * BLOCK)]
        request = Request(request_id=f"holds {number}", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=0))
        assert engine.reserve(request) is not None
        taken += engine.detach(request.request_id, then_wait=False)
    return taken


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_leaves_in_any_state_leaves_nothing(
    connector: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(dice(15), {"verify": Rates.only("delay")} if state == "verifying" else {})
    async with linked(connector, faults) as pair:
        receiver, engine, load = pair.decode.receiver, pair.decode.engine, Load(pair, abort_share=0)
        taken: list[int] = []
        with monkeypatch.context() as patch:
            match state:
                case "linking":
                    patch.setattr(receiver._links, "_shake_hands", lambda *_: asyncio.Event().wait())
                case "waiting":
                    taken = await pair.decode.thread.call(lambda: take_all_blocks(pair))
                case "reserved":  # the order does not arrive
                    patch.setattr(pair.prefill.sender, "_on_frame", lambda peer, frame: None)
                case "landing":
                    flush = FaultySender.flush
                    patch.setattr(FaultySender, "flush", lambda *a: (time.sleep(0.1), flush(*a)))

            def at(key: str) -> str:
                if key in receiver._transfers:
                    return receiver._transfers[key].machine.state.value
                if key in receiver._starting:
                    return "waiting" if receiver._room.waiting else "linking"
                return "decoding"

            for number in range(5):
                await load.submit(f"q{number}", NOWHERE, max_tokens=200)
                ends = time.monotonic() + 10
                while (now := at(f"q{number}/0")) != state:
                    assert time.monotonic() < ends, now
                    await asyncio.sleep(0)
                reply = await pair.worker.Abort(worker_pb2.AbortRequest(request_id=f"q{number}"), timeout=10)
                assert reply.known
        await pair.decode.thread.call(lambda: engine.release_blocks(taken))
        assert not any((await load.settled()).values())
        committed = pair.decode.metrics.transfers.labels("committed")._value.get()
        assert committed == (5 if state == "decoding" else 0)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_request_that_the_decode_worker_refuses_costs_the_prefill_worker_nothing(connector: str) -> None:
    """It is looked at before anything is ordered."""
    async with linked(connector, Faults(dice(16), {})) as pair:
        for prompt in ([], [1] * (pair.decode.engine.max_model_len + 1)):
            request = worker_pb2.SubmitRequest(
                request_id="long",
                prompt_token_ids=prompt,
                sampling=worker_pb2.Sampling(max_tokens=1),
                deadline_seconds=5,
                reply_to=NOWHERE,
                prefill=pair.endpoint,
                worker_incarnation=pair.decode.incarnation,
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pair.worker.Submit(request, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not any((await pair.leftovers()).values())
        assert pair.faults.passed["order"] == 0


async def test_requests_whose_prefill_worker_does_not_exist_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a pair, ten thousand times: the rest is refused, and nothing is kept of those that were aborted."""
    async with linked("tcp", Faults(dice(17), {})) as pair:
        monkeypatch.setattr(pair.decode.receiver._links, "_shake_hands", lambda *_: asyncio.Event().wait())
        monkeypatch.setattr(pair.decode.service, "_max_waiting", 50)
        monkeypatch.setattr(links, "_CONNECT_SECONDS", 60.0)
        load, full = Load(pair, abort_share=0), 0
        for number in range(300):
            try:
                await load.submit(f"q{number}", NOWHERE, max_tokens=1)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                full += 1
        assert full == 250 and len(pair.decode.receiver._starting) == 50
        for number in range(300):
            await pair.worker.Abort(worker_pb2.AbortRequest(request_id=f"q{number}"), timeout=10)
        await asyncio.sleep(0)
        assert not pair.decode.receiver._starting and not any((await load.settled()).values())
