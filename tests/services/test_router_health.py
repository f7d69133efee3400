"""A router that hears how attempts end: who fails gets nothing, is asked, and comes back."""

import time

import pytest
from router_cluster import Cluster, chain, cluster, eventually

from router import breaker
from services.rpc import router_pb2


async def report(made: Cluster, decode: str, outcome: router_pb2.Outcome, prefill: str = "", **fields: bool) -> None:
    """An attempt ended that no router has booked, or that this one may have."""
    request = router_pb2.ReleaseRequest(request_id="x", decode=decode, prefill=prefill, outcome=outcome, **fields)
    await made.router.Release(request, timeout=5)


async def test_worker_with_the_best_cache_that_fails_is_left_out_and_its_probe_brings_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "PAUSE", 0.2)
    async with cluster() as made:
        bad = await made.join("a", held=chain("hot"))
        await made.join("b")

        async def known() -> bool:
            return await made.cached(bad, chain("hot")) == 10

        await eventually(known)
        taken = []
        for number in range(20):
            name = f"cmpl-{number}-0"
            placement = await made.place(chain("hot"), request_id=name)
            taken.append(placement.decode.incarnation)
            outcome = router_pb2.WORKER_ERROR if taken[-1] == "a" else router_pb2.OK
            end = router_pb2.ReleaseRequest(request_id=name, outcome=outcome, decode=taken[-1])
            await made.router.Release(end, timeout=5)
        assert taken == ["a"] * breaker.FAULTS + ["b"] * (20 - breaker.FAULTS)
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_breakers", of="worker", state="open") == 1
        assert await made.metric("tandem_router_outcomes_total", outcome="worker_error") == breaker.FAULTS
        reply = await made.router.Explain(router_pb2.ExplainRequest(request="cmpl-19"), timeout=5)
        (left_out,) = reply.placements[0].left_out
        assert "breaker open" in left_out.reason and left_out.name == bad.member.name

        async def back() -> bool:
            made.service.tick(time.monotonic())
            placement = await made.place(chain("hot"), request_id="probe")
            if placement.decode.incarnation == "a":
                return True
            await made.router.Release(router_pb2.ReleaseRequest(request_id="probe"), timeout=5)
            return False

        await eventually(back)
        assert (await made.place(chain("hot"))).decode.incarnation == "b"  # one probe at a time
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_breakers", of="worker", state="half_open") == 1
        end = router_pb2.ReleaseRequest(request_id="probe", outcome=router_pb2.OK, decode="a")
        await made.router.Release(end, timeout=5)
        # The other one has been asked for the same by now: any of the two is as good.
        assert "a" in {(await made.place(chain("hot"))).decode.incarnation for _ in range(10)}


async def test_mistakes_of_clients_and_of_strangers_leave_all_as_it_is() -> None:
    async with cluster() as made:
        await made.join("a", held=chain("hot"))
        for _ in range(20):
            await report(made, "a", router_pb2.CLIENT_ERROR)
            await report(made, "a", router_pb2.ABORTED)
            await report(made, "nobody", router_pb2.LOST)
            await report(made, "", router_pb2.LOST)
            await report(made, "a", 77)  # type: ignore[arg-type]  # of a later version
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_breakers", of="worker", state="open") == 0
        assert list((await made.place()).decode.incarnation) == ["a"]
        assert await made.metric("tandem_router_outcomes_total", outcome="untold") == 20


async def test_a_pair_that_fails_is_parted_and_says_so() -> None:
    async with cluster(local_prefill_tokens=0) as made:
        for name, role in (("p", "prefill"), ("d", "decode")):
            await made.join(name, role)
        assert (await made.place()).prefill.incarnation == "p"
        for _ in range(breaker.FAULTS):
            await report(made, "d", router_pb2.OK, "p", prefill_failed=True)
        placement = await made.place(request_id="cmpl-1-0")
        assert placement.decode.incarnation == "d" and not placement.HasField("prefill")
        reply = await made.router.Explain(router_pb2.ExplainRequest(request="cmpl-1"), timeout=5)
        (left_out,) = reply.placements[0].left_out
        assert left_out.name == "prefill" and "pair" in left_out.reason
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_breakers", of="pair", state="open") == 1
        assert await made.metric("tandem_router_breakers", of="worker", state="open") == 0
        assert await made.metric("tandem_router_transfer_faults_total") == breaker.FAULTS


async def test_worker_that_fails_more_often_than_its_peers_is_put_out_and_counted() -> None:
    async with cluster() as made:
        await made.join("a")
        await made.join("b")
        for number in range(24):  # not often enough for a breaker
            await report(made, "a", router_pb2.OK if number % 3 else router_pb2.WORKER_ERROR)
            await report(made, "b", router_pb2.OK)
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_ejections_total", reason="faults") == 1
        assert await made.metric("tandem_router_workers_ejected") == 1
        assert await made.metric("tandem_router_breakers", of="worker", state="open") == 0


async def test_worker_without_requests_is_asked_until_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE", 0.05)
    monkeypatch.setattr(breaker, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.2)
    async with cluster() as made:
        worker = await made.join("a")
        await made.join("b")
        for _ in range(breaker.FAULTS):
            await report(made, "a", router_pb2.LOST)

        async def breakers() -> float:
            made.service.tick(time.monotonic())
            return sum(
                [await made.metric("tandem_router_breakers", of="worker", state=s) for s in ("open", "half_open")]
            )

        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert await breakers() == 1  # it answers that it is not ready
        await worker.server.set_healthy(True)

        async def closed() -> bool:
            return await breakers() == 0

        await eventually(closed)
        await report(made, "a", router_pb2.LOST)
        assert await breakers() == 1  # the first fault after that is one too many
