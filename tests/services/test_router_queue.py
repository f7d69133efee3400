"""Requests that the router holds: in which order they get their turn, and how they leave without one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from router_cluster import BLOCK_SIZE, Cluster, Worker, cluster, eventually

from services.rpc import router_pb2

OTHER = "another tenant"


class Held:
    """Places that wait, by name, and the order in which they were answered."""

    def __init__(self, made: Cluster) -> None:
        self._made = made
        self.answered: list[str] = []
        self.calls: dict[str, asyncio.Task[router_pb2.Placement]] = {}
        self._attempts: dict[str, int] = {}

    async def place(self, name: str, **fields: Any) -> None:
        """Asks, and goes on when the router holds it."""
        before = len(self.calls)
        waits = await self.waiting()
        self._attempts[name] = fields.get("attempt", 0)
        self.calls[name] = asyncio.ensure_future(self._place(name, **fields))
        assert len(self.calls) == before + 1

        async def holds() -> bool:
            return await self.waiting() == waits + 1 or self.calls[name].done()

        await eventually(holds)

    async def waiting(self) -> float:
        return await self._made.metric("tandem_router_queue_requests")

    async def _place(self, name: str, **fields: Any) -> router_pb2.Placement:
        placement = await self._made.place(request_id=name, **fields)
        self.answered.append(name)
        return placement

    async def release_one(self, name: str) -> None:
        """The request ends, so that the next gets its turn."""
        number = len(self.answered)
        await self._made.router.Release(router_pb2.ReleaseRequest(request_id=name, attempt=self._attempts[name]))

        async def answered() -> bool:
            return len(self.answered) > number

        await eventually(answered)

    async def release_all(self) -> None:
        """One after the other."""
        while await self.waiting():
            await self.release_one(self.answered[-1])


def full(worker: Worker, made: Cluster, is_full: bool = True) -> None:
    """Requests wait for blocks on the worker, so that it takes another only when it has none."""
    worker.member.load.waiting_for_blocks = int(is_full)
    made.service.on_change("updated", worker.member)


@contextlib.asynccontextmanager
async def busy(**config: Any) -> AsyncIterator[tuple[Cluster, Held, Worker]]:
    """A cluster of one worker, which is full with one request, named `first`."""
    async with cluster(**config) as made:
        worker = await made.join("a")
        full(worker, made)
        held = Held(made)
        await held.place("first")
        assert held.answered == ["first"]  # a worker that is idle takes any
        yield made, held, worker
        for call in held.calls.values():
            call.cancel()
        await asyncio.gather(*held.calls.values(), return_exceptions=True)


async def test_held_ones_get_their_turn_in_fair_order() -> None:
    async with busy() as (made, held, _):
        for name in ("1", "2", "3", "4"):
            await held.place(name)
        await held.place("other", tenant=OTHER)
        await held.place("long", tenant=OTHER, prompt_tokens=5000)
        await held.place("short", tenant=OTHER, prompt_tokens=20)
        await held.place("low", priority=1)
        await held.place("high", priority=-1)
        assert await held.waiting() == 9
        await held.release_all()
        assert held.answered[:2] == ["first", "high"] and held.answered[-1] == "low"
        assert [name for name in held.answered if name in "1234"] == ["1", "2", "3", "4"]
        assert [name for name in held.answered if name in ("other", "long", "short")] == ["short", "other", "long"]
        assert max(held.answered.index("short"), held.answered.index("other")) < held.answered.index("3")
        for priority, number in (("high", 1), ("normal", 7), ("low", 1)):
            assert await made.metric("tandem_router_queue_seconds_count", priority=priority) == number
        assert await made.metric("tandem_router_queue_tokens") == 0
        (explained,) = (await made.router.Explain(router_pb2.ExplainRequest(request="low"))).placements
        assert explained.held_seconds > 0
        assert not (await made.router.Explain(router_pb2.ExplainRequest(request="first"))).placements[0].held_seconds


async def test_a_worker_that_has_room_again_takes_them_without_a_release() -> None:
    async with busy() as (made, held, worker):
        await held.place("1")
        await held.place("2")
        full(worker, made, False)
        await asyncio.gather(*held.calls.values())
        assert held.answered == ["first", "1", "2"]


async def test_another_worker_that_joins_takes_one() -> None:
    async with busy() as (made, held, _):
        await held.place("1")
        await held.place("2")
        full(await made.join("b"), made)
        assert (await held.calls["1"]).decode.incarnation == "b"
        assert not held.calls["2"].done()


async def test_workers_of_one_model_do_not_keep_another_s_requests_waiting() -> None:
    async with busy() as (made, held, worker):
        worker.member.model.name = "full"
        full(worker, made)
        await held.place("1", model="full")
        other = await made.join("b")
        other.member.model.name = "free"
        made.service.on_change("updated", other.member)
        assert (await made.place(model="free")).decode.incarnation == "b"
        assert not held.calls["1"].done() and await held.waiting() == 1


async def test_prompts_that_are_computed_make_room() -> None:
    """Nobody tells of it."""
    async with cluster() as made:
        worker = await made.join("a")
        worker.member.load.prefill_tokens_per_second = 1000
        made.service.on_change("updated", worker.member)
        held = Held(made)
        await held.place("first", prompt_tokens=2200)  # after 0.2 s less than 2 s of it are left
        await held.place("second")
        await held.calls["second"]
        (explained,) = (await made.router.Explain(router_pb2.ExplainRequest(request="second"))).placements
        assert explained.held_seconds > 0.05


async def test_kv_that_is_free_decides() -> None:
    """As told, and since then as booked."""
    async with cluster() as made:
        worker = await made.join("a")
        worker.member.model.num_blocks, worker.member.load.free_blocks = 100, 100
        made.service.on_change("updated", worker.member)
        held = Held(made)
        for number in range(9):  # 170 tokens each, of 1,600
            await held.place(str(number))
        assert len(held.answered) == 9
        await held.place("tenth")
        assert not held.calls["tenth"].done()
        await held.release_one("0")
        assert held.answered[-1] == "tenth"
        await held.place("a large one", prompt_tokens=1500)
        worker.member.load.free_blocks = 1520 // BLOCK_SIZE
        made.service.on_change("updated", worker.member)
        await held.calls["a large one"]


async def test_whoever_cancels_leaves_without_a_trace() -> None:
    async with busy() as (made, held, _):
        for name in ("1", "2", "3"):
            await held.place(name)
        held.calls["1"].cancel()
        held.calls["2"].cancel()

        async def left() -> bool:
            return await held.waiting() == 1

        await eventually(left)
        await held.release_all()
        assert held.answered == ["first", "3"]
        assert await made.metric("tandem_router_reservations") == 1
        assert await made.metric("tandem_router_queue_tokens") == 0
        assert not any(line._tickets for line in made.service._lines._lines.values())


async def test_a_gateway_that_dies_leaves_nobody_in_the_queue() -> None:
    async with busy() as (made, held, _):
        for name in ("1", "2"):
            await held.place(name)
        await made.channel.close()
        async with asyncio.timeout(10):
            while any(map(len, made.service._lines._lines.values())):
                await asyncio.sleep(0.01)
        assert not any(line._tickets for line in made.service._lines._lines.values())
        for call in held.calls.values():  # gRPC cancels them
            with contextlib.suppress(asyncio.CancelledError):
                await call


async def test_an_attempt_that_is_released_waits_no_more() -> None:
    """Its gateway has given it up, though its call may still hang somewhere."""
    async with busy() as (made, held, _):
        await held.place("1")
        await held.place("2")
        await made.router.Release(router_pb2.ReleaseRequest(request_id="1"))
        with pytest.raises(grpc.aio.AioRpcError) as released:
            await held.calls["1"]
        assert released.value.code() is grpc.StatusCode.ABORTED
        await held.release_all()
        assert held.answered == ["first", "2"]


async def test_asked_twice_it_waits_once() -> None:
    async with busy() as (_, held, _worker):
        await held.place("1")
        old = held.calls.pop("1")
        held.calls["1"] = asyncio.ensure_future(held._place("1"))
        with pytest.raises(grpc.aio.AioRpcError):
            await old
        assert await held.waiting() == 1
        await held.release_all()
        assert held.answered == ["first", "1"]


def retry_after(error: grpc.aio.AioRpcError) -> float:
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (seconds,) = (value for key, value in error.trailing_metadata() or () if key == "retry-after")
    return float(seconds)


async def test_a_full_queue_refuses_and_says_how_long_it_is() -> None:
    async with busy(max_queue=2) as (made, held, worker):
        worker.member.load.prefill_tokens_per_second = 100
        full(worker, made)
        for name in ("1", "2"):  # 170 tokens each
            await held.place(name, deadline_seconds=100)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place(deadline_seconds=100)
        assert 2 <= retry_after(refused.value) <= 1.25 * 4 and "2 requests wait already" in str(refused.value.details())
        assert await made.metric("tandem_router_shed_total", reason="queue full") == 1
        await held.place("again", attempt=1)  # its client has heard of it already
        await held.release_all()
        assert held.answered == ["first", "again", "1", "2"]


async def test_who_would_be_too_late_is_refused_at_once() -> None:
    async with busy() as (made, held, worker):
        worker.member.load.prefill_tokens_per_second = 100
        full(worker, made)
        for name in ("1", "2", "3"):
            await held.place(name, deadline_seconds=100)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place(prompt_tokens=1000, deadline_seconds=4)  # it would go before them, and take 10 s
        assert 6 <= retry_after(refused.value) <= 1.25 * 7.6
        assert "has 4.0 s (deadline)" in str(refused.value.details())
        assert await made.metric("tandem_router_shed_total", reason="deadline") == 1
        assert await held.waiting() == 3


async def test_what_would_miss_the_aim_is_refused_while_all_are_full() -> None:
    async with busy(slo_ttft=3.0) as (made, held, worker):
        worker.member.load.prefill_tokens_per_second = 100
        full(worker, made)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place(prompt_tokens=1000, deadline_seconds=100)  # 10 s
        assert 7 <= retry_after(refused.value) <= 1.25 * 8.6 and "has 3.0 s (slo)" in str(refused.value.details())
        assert await made.metric("tandem_router_shed_total", reason="slo") == 1
        full(await made.join("b"), made)
        await held.place("1", prompt_tokens=1000, deadline_seconds=100)  # as late, but there is room
        assert held.answered == ["first", "1"]


async def test_without_a_queue_a_full_cluster_refuses() -> None:
    async with busy(max_queue=0) as (made, _, _worker):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place()
        assert retry_after(refused.value) > 0


async def test_workers_that_leave_leave_nobody_waiting() -> None:
    """With nobody to wait for, the request is answered as if it had never waited."""
    async with busy() as (made, held, worker):
        await held.place("1")
        made.service.on_change("left", worker.member)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await held.calls["1"]
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await held.waiting() == 0


async def test_what_the_planner_has_it_shed_is_refused_the_least_urgent_first_and_for_a_while() -> None:
    async with busy() as (made, _, worker):
        full(worker, made, False)

        async def shed(share: float, seconds: float = 60.0, model: str = "m") -> None:
            await made.router.Shed(router_pb2.ShedRequest(model=model, share=share, seconds=seconds))

        async def refused(priority: int, number: int, **fields: Any) -> int:
            """Of so many requests."""
            count = 0
            for each in range(number):
                try:
                    await made.place(model="m", priority=priority, **({"request_id": f"{priority}.{each}"} | fields))
                except grpc.aio.AioRpcError as error:
                    assert 1 <= retry_after(error) <= 1.25 * 30
                    assert dict(error.trailing_metadata() or ())["shed"] == "planner"
                    count += 1
            return count

        for _ in range(20):
            assert not await refused(0, 1) + await refused(1, 1)
        await shed(0.25)
        counts = {0: 0, 1: 0}
        for _ in range(40):
            for priority in counts:
                counts[priority] += await refused(priority, 1)
        assert counts[0] == 0 and 19 <= counts[1] <= 21  # a quarter of all, which is half of those
        assert await made.metric("tandem_router_shed_total", reason="planner") == counts[1]
        assert await made.metric("tandem_router_shed_share", model="m") == 0.25
        (model,) = (await made.router.Status(router_pb2.StatusRequest())).models
        assert model.shed == 0.25
        assert not await refused(1, 5, request_id="stream-0", attempt=1)  # its client has heard of it already
        assert not await refused(1, 5, request_id="response-1")  # the first choice was let in
        await shed(0.9, seconds=0.05)
        await asyncio.sleep(0.06)  # the planner is gone
        assert not await refused(1, 20)
        made.service.tick(0.0)
        assert await made.metric("tandem_router_shed_share", model="m") == 0
        await shed(0.9)
        await shed(0.0)
        assert not await refused(1, 20)
        for wrong in ({"share": 1.5}, {"share": float("nan")}, {"share": 0.5, "seconds": 1e9}):
            with pytest.raises(grpc.aio.AioRpcError, match="are wanted"):
                await shed(**wrong)
        with pytest.raises(grpc.aio.AioRpcError, match="was ever seen"):
            await shed(0.5, model="another")


async def test_a_model_whose_workers_are_gone_for_an_hour_is_forgotten() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        assert await made.metric("tandem_router_workers", role="decode", model="m") == 1
        now = time.monotonic()
        made.service.tick(now + 4000)  # as long as it has workers, it stays
        made.service.on_change("left", worker.member)
        made.service.tick(now + 3500)
        assert await made.metric("tandem_router_workers", role="decode", model="m") == 0  # which raises an alert
        made.service.tick(now + 3700)
        with pytest.raises(AssertionError, match="no metric"):
            await made.metric("tandem_router_workers", role="decode", model="m")
        assert not (await made.router.Status(router_pb2.StatusRequest())).models
        made.workers.clear()
        await worker.close()
