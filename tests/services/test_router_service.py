"""The router process: what gateways are told."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import grpc
import pytest
from router_cluster import BLOCK_SIZE, Worker, chain, cluster, eventually
from structlog.testing import capture_logs

from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.rpc import router_pb2, router_pb2_grpc
from services.rpc_server import make_channel
from services.security import ClusterKey

# Placements


async def test_nobody_there() -> None:
    async with cluster() as made:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no decode or aggregated worker" in (refused.value.details() or "")
        assert ("retry-after", "1") in [tuple(pair) for pair in refused.value.trailing_metadata() or ()]


async def test_excluded_and_draining_workers_get_nothing() -> None:
    async with cluster() as made:
        await made.join("a")
        worker = await made.join("b")
        assert (await made.place(exclude_incarnations=["a"])).decode.incarnation == "b"
        worker.member.draining = True
        made.service.on_change("updated", worker.member)
        assert {(await made.place()).decode.incarnation for _ in range(10)} == {"a"}
        with pytest.raises(grpc.aio.AioRpcError):
            await made.place(exclude_incarnations=["a"])


async def test_full_workers_get_less_as_long_as_there_are_others() -> None:
    async with cluster() as made:
        full = await made.join("a")
        await made.join("b")
        full.member.load.waiting_for_blocks = 1
        made.service.on_change("updated", full.member)
        assert [(await made.place()).decode.incarnation for _ in range(2)] == ["b", "b"]
        assert {(await made.place()).decode.incarnation for _ in range(10)} == {"a", "b"}  # by now b has as much to do
        assert await made.metric("tandem_router_workers_full") == 1
        full.member.load.waiting_for_blocks = 0
        made.service.on_change("updated", full.member)
        assert await made.metric("tandem_router_workers_full") == 0


async def test_it_is_said_once_a_while_that_nobody_prefills() -> None:
    async with cluster() as made:
        await made.join("a")
        with capture_logs() as logs:
            for _ in range(5):
                await made.place()
            made.service._say_alone_at = {}  # a minute later
            await made.place()
            await made.join("p", "prefill")
            made.service._say_alone_at = {}
            assert (await made.place()).prefill.incarnation == "p"
        assert [entry["log_level"] for entry in logs if "no prefill worker" in entry["event"]] == ["warning"] * 2


async def test_prefill_and_decode_are_found_at_their_addresses() -> None:
    async with cluster() as made:
        decode, prefill = await made.join("a"), await made.join("b", "prefill")
        placement = await made.place(chain("x"))
        assert placement.decode.address == decode.member.grpc_address
        assert placement.prefill.address == prefill.member.grpc_address
        assert placement.reason.startswith("prefix: ")
        assert not (await made.place(local_prefill_only=True)).HasField("prefill")
        assert not (await made.place(prompt_tokens=20)).HasField("prefill")
        for reason, number in (("remote prefill", 1), ("local prefill asked for", 1), ("short uncached prompt", 1)):
            assert await made.metric("tandem_router_placements_total", reason=reason) == number
        assert await made.metric("tandem_router_decision_seconds_count") == 3


async def test_a_burst_of_one_prefix_stays_together() -> None:
    """Before any worker has told of a block, requests follow the first of their kind."""
    async with cluster() as made:
        for incarnation in "abcd":
            await made.join(incarnation, "prefill")
        await made.join("e")
        for name in ("x", "y", "z"):
            assert len({(await made.place(chain(name))).prefill.incarnation for _ in range(8)}) == 1


async def test_load_is_booked_and_comes_back() -> None:
    async with cluster(policy="least_outstanding") as made:
        await made.join("a")
        await made.join("b")
        first = (await made.place(prompt_tokens=1000)).decode.incarnation
        second = {(await made.place()).decode.incarnation for _ in range(3)}
        assert second == {"a", "b"} - {first}
        for number in range(1, 5):
            for _ in range(2):  # a second release changes nothing
                await made.router.Release(router_pb2.ReleaseRequest(request_id=f"r{number}", cached_tokens=32))
        await made.router.Release(router_pb2.ReleaseRequest(request_id="never placed"))
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_reservations") == 0
        assert await made.metric("tandem_router_overlap_blocks_total", kind="actual") == 4 * 2
        assert await made.metric("tandem_router_overlap_blocks_total", kind="predicted") == 0


@pytest.mark.parametrize("deadline", [0.0, 9.0, float("inf"), float("nan"), -5.0])
async def test_a_gateway_that_dies_leaves_no_load_for_ever(deadline: float) -> None:
    async with cluster() as made:
        await made.join("a")
        await made.place(deadline_seconds=deadline)
        made.service.tick(time.monotonic() + 20)
        assert await made.metric("tandem_router_reservations") == 1
        made.service.tick(time.monotonic() + 2 * 3600)
        assert await made.metric("tandem_router_reservations") == 0


# The process


async def test_the_process_joins_the_cluster_places_and_leaves() -> None:
    """With a cluster key; when Redis is gone it places with what it knows."""
    secret = "0123456789abcdef" * 2
    key = ClusterKey(secret)
    state = EmbeddedState()
    environment = {**os.environ, "TANDEM_STATE": state.url, "TANDEM_CLUSTER_KEY": secret, "TANDEM_CLUSTER": "test"}
    process = subprocess.Popen([sys.executable, "-m", "services.cli", "serve", "router"], env=environment)
    view = ClusterState(state.url, "test")
    worker = Worker("a" * 32, "aggregated", key)
    try:
        await worker.server.start()
        await view.connect()
        await view.register(worker.member)

        async def joined() -> bool:
            return bool(view.members("router"))

        await eventually(joined)
        channel = make_channel(view.members("router")[0].grpc_address, key)
        router = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.PlaceRequest(
            request_id="r", chains=[router_pb2.HashChain(layout="l", block_hashes=chain("x"))], prompt_tokens=160
        )

        async def placed() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await router.Place(request, timeout=5)).decode.incarnation == worker.member.incarnation
            return False

        await eventually(placed)
        worker.store(chain("x"))

        async def followed() -> bool:
            if worker.events.sequence < 50:
                worker.store([os.urandom(16)])  # events before the subscription are noticed by the next one
            return (await router.Place(request, timeout=5)).decode_cached_blocks == 10

        await eventually(followed)
        unsigned = make_channel(view.members("router")[0].grpc_address, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router_pb2_grpc.RouterStub(unsigned).Place(request, timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await unsigned.close()
        state.close()
        await asyncio.sleep(3)  # longer than a lease
        assert (await router.Place(request, timeout=5)).decode_cached_blocks == 10
        await channel.close()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait()
        await view.close()
        await worker.close()
        state.close()


def test_torch_is_never_loaded() -> None:
    imports = "import sys, services.router.serve"
    code = f"{imports}; sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_placement_names_who_has_the_prefix_as_long_as_fetching_pays() -> None:
    async with cluster(fetch_tokens=64, local_prefill_tokens=0) as made:
        decode = await made.join("d", held=chain("x"))
        prefill = await made.join("p", "prefill")

        async def known() -> bool:
            return (await made.place(chain("x", 20), prompt_tokens=320, request_id="probe")).HasField("source")

        await eventually(known)
        await made.router.Release(router_pb2.ReleaseRequest(request_id="probe"))
        before = await made.metric("tandem_router_fetches_total")
        placement = await made.place(chain("x", 20), prompt_tokens=320)
        assert placement.prefill.incarnation == "p" and placement.source.worker.incarnation == "d"
        assert placement.source.tokens == 10 * BLOCK_SIZE and "160 tokens to be fetched from decode" in placement.reason
        assert await made.metric("tandem_router_fetches_total") == before + 1
        assert not (await made.place(chain("y"))).HasField("source")
        load = prefill.member.load
        measured = ((1000, None, True), (1000, 500, False), (1000, 2000, True), (0.1, 0, False))
        for prefill_rate, fetch_rate, fetches in measured:
            load.prefill_tokens_per_second = prefill_rate
            load.ClearField("fetch_tokens_per_second")
            if fetch_rate is not None:
                load.fetch_tokens_per_second = fetch_rate
            made.service.on_change("updated", prefill.member)
            for number in range(1, 20):  # a slow worker that has something to do takes no more
                await made.router.Release(router_pb2.ReleaseRequest(request_id=f"r{number}"))
            assert (await made.place(chain("x", 20), prompt_tokens=320)).HasField("source") == fetches
        load.Clear()
        for able, unable in ((prefill.member, "fetches"), (decode.member, "sends")):
            for is_able in (False, True):
                setattr(able, unable, is_able)
                made.service.on_change("updated", able)
                assert (await made.place(chain("x", 20), prompt_tokens=320)).HasField("source") == is_able


async def test_placements_are_remembered_as_they_were_decided() -> None:
    async with cluster(policy="least_outstanding") as made:
        decode, prefill = await made.join("d"), await made.join("p", "prefill")
        await made.place(chain("x"), request_id="cmpl-1-0")
        await made.place(chain("x"), request_id="cmpl-1-0", attempt=1)
        await made.place(chain("x"), request_id="cmpl-10-0")

        async def explained(request: str) -> list[router_pb2.Explanation]:
            reply = await made.router.Explain(router_pb2.ExplainRequest(request=request), timeout=5)
            return list(reply.placements)

        first, again = await explained("cmpl-1")
        assert (first.attempt, again.attempt) == ("cmpl-1-0/0", "cmpl-1-0/1")
        assert [each.attempt for each in await explained("cmpl-1-0/1")] == ["cmpl-1-0/1"]
        assert [each.attempt for each in await explained("")] == ["cmpl-10-0/0"]
        assert await explained("nobody's") == []
        assert (first.policy, first.prompt_tokens, first.source) == ("least_outstanding", 160, "")
        assert first.reason.startswith("least_outstanding: ") and 0 <= first.seconds_ago < 10
        assert [(each.role, each.candidates) for each in again.rankings] == [("decode", 1), ("prefill", 1)]
        (decoding,), (prefilling,) = (each.best for each in again.rankings)
        assert (decoding.name, decoding.requests, decoding.kept_tokens, decoding.cost) == ("decode", 1, 170, 170)
        assert (prefilling.name, prefilling.queued_tokens, prefilling.expected_tokens) == ("prefill", 160, 160)
        for worker in (decode, prefill):  # it is told all the same
            made.service.on_change("left", worker.member)
        assert (await explained("cmpl-1"))[1].rankings == again.rankings
