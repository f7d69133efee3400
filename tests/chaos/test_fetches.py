"""Prefixes that come from a peer's cache: what can be had is used, and whatever goes wrong changes no token."""

import asyncio
import threading
import time
from typing import Any

import pytest
from chaos.faults import Faults, dice, everywhere
from chaos.load import Load
from chaos.mock_engine import BLOCK
from chaos.pair import CONNECTORS, Pair, linked

from engine.engine import StepOutput
from engine.request import Request, SamplingParams
from kv_transfer.connectors import zmq_stream
from services.rpc import router_pb2, trace_pb2, worker_pb2
from services.worker import links, prefix_costs, receiving, sending


def fetches(pair: Pair, outcome: str) -> int:
    return int(pair.decode.metrics.fetches.labels(outcome)._value.get())


def counted(pair: Pair) -> dict[str, int]:
    samples = next(iter(pair.decode.metrics.fetches.collect())).samples
    return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total") and s.value}


async def submit(pair: Pair, name: str, prompt: list[int], source_tokens: int | None = None) -> None:
    source = router_pb2.PrefixSource(
        worker=pair.endpoint, tokens=len(prompt) if source_tokens is None else source_tokens
    )
    await pair.submit(name, prompt, 4, source=source)
    while pair.decode.service.admitted:
        await asyncio.sleep(0.002)


def without_haste() -> None:
    """Waits that no thread misses by being kept from a processor: nothing fails but what is wrong.

    Within `linked` alone, whose end puts back what was there before it.
    """
    waits = (
        (receiving, "_LATE_BYTES_SECONDS", 20.0),
        (zmq_stream, "_STUCK_SECONDS", 20.0),
        (prefix_costs, "_ASSUMED", 0.2),
    )
    for module, name, value in waits:
        setattr(module, name, value)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_what_a_peer_has_is_fetched(connector: str) -> None:
    async with linked(connector, Faults(dice(1), {})) as pair:
        without_haste()
        outcome = await Load(pair, abort_share=0.05, fetch_share=0.5).run(80)
        assert outcome.clean, outcome
        assert fetches(pair, "committed") > 10 and not counted(pair).keys() & {"lost", "damaged", "unreachable"}
        assert pair.decode.metrics.fetched_blocks._value.get() > 20


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_random_faults(connector: str) -> None:
    faults = Faults(dice(2), everywhere())
    async with linked(connector, faults) as pair:
        outcome = await Load(pair, fetch_share=0.6).run(
            150, until=lambda: faults.total >= 30 and fetches(pair, "lost") > 0
        )
        assert outcome.clean, outcome
        assert faults.total >= 30 and fetches(pair, "lost") and sum(counted(pair).values()) > 40


@pytest.mark.parametrize("block_size", [3, 8])
async def test_blocks_of_another_size(block_size: int) -> None:
    """Only whole blocks of the receiver come."""
    async with linked("tcp", Faults(dice(3), {}), prefill_block_size=block_size) as pair:
        outcome = await Load(pair, abort_share=0, fetch_share=0.5).run(60)
        assert outcome.clean and fetches(pair, "committed") > 5, (outcome, counted(pair))


async def test_as_much_as_the_peer_has_and_the_rest_is_computed() -> None:
    async with linked("tcp", Faults(dice(4), {})) as pair:
        prompt = [7 * number for number in range(10 * BLOCK)]
        await pair.prefill.cache(prompt[: 6 * BLOCK + 2])
        await submit(pair, "q0", prompt)
        metrics = pair.decode.metrics
        assert metrics.fetched_blocks._value.get() == 6
        # It is a cached prefix like any other now.
        await submit(pair, "q1", prompt)
        assert metrics.fetched_blocks._value.get() == 6 and counted(pair) == {"committed": 1, "cached": 1}
        assert not any((await pair.leftovers()).values())


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_finds_no_room_fetches_when_its_turn_comes(leaves: bool) -> None:
    async with linked("tcp", Faults(dice(12), {})) as pair:
        without_haste()
        prompt, engine = [43 * number for number in range(40 * BLOCK)], pair.decode.engine
        await pair.prefill.cache(prompt)
        pair.name_kept()
        blocks = await pair.decode.thread.call(lambda: engine._pool.allocate(130))
        source = router_pb2.PrefixSource(worker=pair.endpoint, tokens=len(prompt), tier="host")
        await pair.submit("q0", prompt, 4, source=source)
        while not engine.stats().waiting:
            await asyncio.sleep(0.002)
        assert counted(pair) == {"no room": 1}
        if leaves:
            await pair.worker.Abort(worker_pb2.AbortRequest(request_id="q0"), timeout=10)
        await pair.decode.thread.call(lambda: engine.release_blocks(blocks))
        while pair.decode.service.admitted:
            await asyncio.sleep(0.002)
        assert counted(pair) == {"no room": 1} | ({} if leaves else {"committed": 1})
        assert pair.decode.metrics.fetched_blocks._value.get() == (0 if leaves else 39)
        assert not any((await Load(pair).settled()).values())


async def test_nothing_to_be_had_is_refused_and_computed() -> None:
    async with linked("tcp", Faults(dice(5), {})) as pair:
        await submit(pair, "unknown", [5 * number for number in range(6 * BLOCK)])
        prompt = [13 * number for number in range(6 * BLOCK)]
        await pair.prefill.cache(prompt)
        await pair.prefill.thread.call(pair.prefill.engine.clear_cache)  # what a router knew of it is out of date
        await submit(pair, "forgotten", prompt)
        await submit(pair, "too little", prompt, source_tokens=BLOCK - 1)
        assert counted(pair) == {"refused": 2, "cached": 1}
        assert not any((await pair.leftovers()).values())


async def test_a_peer_that_hangs_is_not_waited_for_longer_than_computing_takes() -> None:
    async with linked("tcp", Faults(dice(6), {})) as pair:
        prompt = [3 * number for number in range(6 * BLOCK)]
        await pair.prefill.cache(prompt)
        await submit(pair, "linked", prompt)
        prompt = [11 * number for number in range(6 * BLOCK)]
        await pair.prefill.cache(prompt)
        go_on = threading.Event()
        pair.prefill.thread.post(go_on.wait)
        await submit(pair, "late", prompt)  # which returns
        assert counted(pair) == {"committed": 1, "late": 1}
        assert pair.decode.costs.fetched("").per_second is not None
        go_on.set()
        assert not any((await Load(pair).settled()).values())


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_link_that_breaks_while_the_engine_is_busy_is_not_waited_for(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked("tcp", Faults(dice(8), {})) as pair:
        prompt = [23 * number for number in range(6 * BLOCK)]
        await pair.prefill.cache(prompt)
        receiver, engine = pair.decode.receiver, pair.decode.thread
        link = await receiver._links.to(pair.endpoint)
        reserve = pair.decode.engine.reserve

        def reserve_late(*args: Any, **options: Any) -> Any:
            engine._loop.call_soon_threadsafe(link.call.cancel)
            assert link.reader is not None
            while not link.reader.done():
                time.sleep(0.001)
            return reserve(*args, **options)

        monkeypatch.setattr(pair.decode.engine, "reserve", reserve_late)
        if not comes_back:
            monkeypatch.setattr(receiver._links, "_shake_hands", unreachable)
        asked = time.monotonic()
        await submit(pair, "q0", prompt)
        assert counted(pair) == {"committed" if comes_back else "unreachable": 1}
        assert time.monotonic() - asked < pair.decode.costs.computing_seconds(len(prompt) - BLOCK)
        assert not any((await Load(pair).settled()).values())


async def test_steps_go_on_between_the_parts_of_a_long_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked("tcp", Faults(dice(11), {})) as pair:
        prompt, engine, sender = [41 * number for number in range(80 * BLOCK)], pair.prefill.engine, pair.prefill.sender
        await pair.prefill.cache(prompt)
        monkeypatch.setattr(sending, "_BYTES_AT_ONCE", 10 * engine.kv_cache.spec.block_bytes)
        happened: list[str] = []
        step, push = engine.step, sender._push

        def counted_step() -> StepOutput:
            happened.append("step")
            return step()

        def counted_push(*args: Any) -> None:
            happened.append("push")
            push(*args)

        monkeypatch.setattr(engine, "step", counted_step)
        monkeypatch.setattr(sender, "_push", counted_push)
        busy = Request(request_id="busy", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=500))
        await pair.prefill.thread.call(lambda: engine.add(busy))
        await submit(pair, "q0", prompt)
        assert counted(pair) == {"committed": 1} and happened.count("push") == 8
        last = len(happened) - happened[::-1].index("push")
        assert "step" in happened[happened.index("push") : last]
        await pair.prefill.thread.call(lambda: engine.abort("busy"))
        assert not any((await Load(pair).settled()).values())


async def unreachable(*_: object) -> links.Link:
    raise links.LinkLost("nobody is there")


@pytest.mark.parametrize("key", ["q0/0", "q0/0/0/fetch"])
async def test_an_order_with_the_id_of_another_request_does_not_end_that(key: str) -> None:
    async with linked("tcp", Faults(dice(9), {})) as pair:
        prompt = [29 * number for number in range(6 * BLOCK)]
        await pair.prefill.cache(prompt)
        own = Request(request_id=key, prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=500))
        await pair.prefill.thread.call(lambda: pair.prefill.engine.add(own))
        if key.endswith("fetch"):
            await submit(pair, "q0", prompt)
            assert counted(pair) == {"refused": 1}
        else:
            load = Load(pair, abort_share=0)
            await load.submit("q0", "tcp://127.0.0.1:1")
            while pair.decode.service.admitted:
                await asyncio.sleep(0.002)
            assert pair.decode.metrics.transfers.labels("recomputed")._value.get() == 1
        sequences = pair.prefill.engine._scheduler.sequences
        await pair.prefill.thread.call(lambda: None)
        assert key in sequences and sequences[key].request is own
        await pair.prefill.thread.call(lambda: pair.prefill.engine.abort(key))
        assert not any((await Load(pair).settled()).values())


@pytest.mark.parametrize("orders", ["a prompt", "a fetch with the id of a request"])
async def test_an_order_that_could_meet_a_request_of_this_worker_is_refused(
    orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that computes prompts for nobody but itself, and in whose engine the id could be in use later."""
    async with linked("tcp", Faults(dice(10), {})) as pair:
        if orders == "a prompt":
            pair.prefill.engine.on_layers = None
            await Load(pair, abort_share=0).submit("q0", "tcp://127.0.0.1:1")
        else:
            monkeypatch.setattr(receiving, "FETCH", "")
            await submit(pair, "q0", [31 * number for number in range(6 * BLOCK)])
        while pair.decode.service.admitted:
            await asyncio.sleep(0.002)
        timelines = await pair.decode.timelines.Timelines(trace_pb2.TimelinesRequest(request="q0"), None)  # type: ignore[arg-type]
        (reason,) = [mark.detail for mark in timelines.timelines[0].marks if mark.event == "recomputed"]
        assert ("computes no prompts" if orders == "a prompt" else "could be a request") in reason
        assert not any((await Load(pair).settled()).values())


@pytest.mark.parametrize("leader_leaves", [False, True])
async def test_those_who_want_the_same_wait_for_one_fetch(leader_leaves: bool) -> None:
    async with linked("tcp", Faults(dice(7), {})) as pair:
        prompt = [17 * number for number in range(8 * BLOCK)]
        await pair.prefill.cache(prompt)
        await submit(pair, "linked", [19 * number for number in range(8 * BLOCK)])
        go_on = threading.Event()
        pair.prefill.thread.post(go_on.wait)  # so that the first one is under way when the others come
        ends = [asyncio.create_task(submit(pair, "q0", prompt))]
        while "q0/0/1/fetch" not in pair.decode.receiver._transfers:
            await asyncio.sleep(0.001)
        ends += [asyncio.create_task(submit(pair, f"q{number}", prompt)) for number in range(1, 6)]
        while len(pair.decode.service.admitted) < 6:
            await asyncio.sleep(0.001)
        if leader_leaves:
            await pair.worker.Abort(worker_pb2.AbortRequest(request_id="q0"), timeout=10)
        go_on.set()
        await asyncio.gather(*ends)
        assert counted(pair) == {
            "refused": 1,
            "committed": 1,
            "shared": 4 if leader_leaves else 5,
            **({"aborted": 1} if leader_leaves else {}),
        }
        assert pair.decode.metrics.fetched_blocks._value.get() == 7
        assert not any((await Load(pair).settled()).values()) and not pair.decode.receiver._fetching
