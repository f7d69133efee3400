"""Load that a router has given to workers: counted where it is, through all that may happen, and back at zero."""

import asyncio
import math
import time

import numpy as np
import pytest
from router_cluster import Cluster, Worker, chain, cluster, eventually

from engine.request import BlockRemoved, BlockStored, CacheCleared
from router.policies import POLICIES
from services.rpc import router_pb2

ENDS = list(router_pb2.Outcome.values())


def booked(made: Cluster, worker: Worker) -> tuple[int, float, float]:
    """Requests, tokens to prefill, tokens kept."""
    row = made.service._placer.fleet.row(worker.member.incarnation)
    requests, prefill, kept = made.service._placer.fleet.table[["requests", "prefill_tokens", "decode_tokens"]][
        row
    ].tolist()
    return requests, prefill, kept


async def release(
    made: Cluster, request_id: str, attempt: int = 0, outcome: router_pb2.Outcome = router_pb2.OK
) -> None:
    await made.router.Release(
        router_pb2.ReleaseRequest(request_id=request_id, attempt=attempt, outcome=outcome), timeout=5
    )


async def test_a_long_prompt_is_load_of_both_its_workers() -> None:
    async with cluster(local_prefill_tokens=0) as made:
        decode, prefill = await made.join("d"), await made.join("p", "prefill")
        for count in (1, 2):
            placement = await made.place(prompt_tokens=4000, request_id=f"r{count}")
            assert placement.prefill.incarnation == "p"
            assert booked(made, prefill) == (count, 4000 * count, 0)
            requests, to_prefill, kept = booked(made, decode)
            assert (requests, to_prefill) == (count, 0) and kept >= 4000 * count
        for name in ("r1", "r2"):
            await release(made, name)
        assert booked(made, decode) == booked(made, prefill) == (0, 0, 0)


async def test_an_attempt_counts_where_it_went() -> None:
    """Also when the end of the first one is told late, or twice."""
    async with cluster() as made:
        first, second = await made.join("a"), await made.join("b")
        await made.place(request_id="r", exclude_incarnations=["b"])
        await made.place(request_id="r", attempt=1, exclude_incarnations=["a"])
        assert (booked(made, first)[0], booked(made, second)[0]) == (1, 1)
        for _ in range(2):
            await release(made, "r", 0, router_pb2.LOST)
            assert (booked(made, first)[0], booked(made, second)[0]) == (0, 1)
        for _ in range(2):
            await release(made, "r", 1)
            assert booked(made, first) == booked(made, second) == (0, 0, 0)


async def test_heartbeats_and_checks_leave_counts_alone() -> None:
    async with cluster() as made:
        workers = [await made.join(name) for name in "ab"]
        for number in range(1, 7):
            await made.place(request_id=f"r{number}")
        before = [booked(made, worker) for worker in workers]
        assert sum(requests for requests, _, _ in before) == 6
        for beat in range(20):
            for worker in workers:
                worker.member.load.steps, worker.member.load.running = beat, 0
                worker.member.draining = beat % 3 == 1
                made.service.on_change("updated", worker.member)
            made.service.tick(time.monotonic() + beat)
            assert [booked(made, worker) for worker in workers] == before
        for number in range(1, 7):
            await release(made, f"r{number}")
        assert [booked(made, worker) for worker in workers] == [(0, 0, 0)] * 2


async def test_whatever_way_attempts_end_nothing_stays_and_nothing_is_taken_twice() -> None:
    """Ends are told once, twice, before the placement and of requests that nobody placed."""
    async with cluster(local_prefill_tokens=0) as made:
        workers = [await made.join("d"), await made.join("e"), await made.join("p", "prefill")]
        for number, outcome in enumerate(3 * ENDS):
            name = f"r{number}"
            if number % 3 == 2:
                await release(made, name, 0, outcome)
            await made.place(request_id=name)
            for _ in range(1 + number % 2):
                await release(made, name, 0, outcome)
            await release(made, "unknown", 0, outcome)
            assert [booked(made, worker) for worker in workers] == [(0, 0, 0)] * 3, (number, outcome)


@pytest.mark.parametrize("policy", POLICIES)
async def test_workers_whose_numbers_make_no_sense_are_placed_on_like_others(policy: str) -> None:
    """Before their first heartbeat, or with rates that are none."""
    async with cluster(policy=policy, local_prefill_tokens=0) as made:
        for role in ("prefill", "decode"):
            for number, rate in enumerate((None, math.nan, math.inf, -math.inf, -5.0, 0.0, 1e308, 5e-324)):
                worker = await made.join(f"{role}-{number}", role)
                if rate is not None:
                    worker.member.load.prefill_tokens_per_second = rate
                    worker.member.load.fetch_tokens_per_second = rate
                    made.service.on_change("updated", worker.member)
        placed = [await made.place(chain(f"{number}"), session=f"{number}") for number in range(300)]
        assert len({each.decode.incarnation for each in placed}) == 8
        assert len({each.prefill.incarnation for each in placed}) == 8
        for number in range(1, 301):
            await release(made, f"r{number}")
        table = made.service._placer.fleet.table
        assert not table["requests"].any() and not table["prefill_tokens"].any() and not table["decode_tokens"].any()
        assert not np.isnan(made.service._placer.reservations.queued(time.monotonic())).any()


async def test_a_worker_that_is_back_at_other_addresses_is_found_there_only() -> None:
    async with cluster() as made:
        before = await made.join("a")
        await made.place(chain("x"), request_id="old")
        made.service.on_change("left", before.member)
        after = await made.join("b")
        assert after.member.name == before.member.name
        placed = [await made.place(chain("x")) for _ in range(10)]
        assert {each.decode.address for each in placed} == {after.member.grpc_address}
        assert booked(made, after)[0] == 10
        await release(made, "old")  # it was on the one that is gone
        assert booked(made, after)[0] == 10
        await made.followed(after)  # at its new address


@pytest.mark.parametrize("policy", ["prefix", "history", "session", "overlap"])
async def test_a_prefix_stays_with_its_first_worker_from_a_cold_start(policy: str) -> None:
    """Nobody has anything cached: the second request of a kind already knows where the first went."""
    async with cluster(policy=policy) as made:
        workers = {name: await made.join(name, "aggregated") for name in "abcd"}
        for worker in workers.values():
            await made.followed(worker)
        for name in ("x", "y", "z"):
            taken = []
            for number in range(10):
                placement = await made.place(chain(name), request_id=f"{name}{number}")
                taken.append(placement.decode.incarnation)
                worker = workers[taken[-1]]
                if policy == "overlap" and not number:  # it looks at what was told alone
                    worker.store(chain(name))
                await release(made, f"{name}{number}")
                if policy == "overlap" and not number:

                    async def heard(worker: Worker = worker, name: str = name) -> bool:
                        return await made.cached(worker, chain(name)) == 10

                    await eventually(heard)
            assert len(set(taken)) == 1, (name, taken)


@pytest.mark.parametrize("policy", ["prefix", "history"])
async def test_a_worker_that_was_wiped_attracts_nothing(policy: str) -> None:
    """Neither by what it held nor by what it was expected to hold; also when it is told amid no other events."""
    async with cluster(policy=policy) as made:
        wiped = await made.join("a")
        await made.join("b")
        await made.followed(wiped)
        await made.place(chain("x"), request_id="first", exclude_incarnations=["b"])
        await release(made, "first")
        wiped.store(chain("x"))

        async def known() -> bool:
            return await made.cached(wiped, chain("x")) == 10

        await eventually(known)
        await made.place(chain("other"), exclude_incarnations=["b"])  # b has less to do
        assert (await made.place(chain("x"), request_id="again")).decode.incarnation == "a"
        await release(made, "again")
        wiped.events.publish([CacheCleared()])
        row = made.service._placer.fleet.row("a")

        async def empty() -> bool:
            return not made.service._placer.index.num_blocks(row)

        await eventually(empty)
        assert (await made.place(chain("x"))).decode.incarnation == "b"


@pytest.mark.parametrize("policy", ["prefix", "history", "overlap", "least_outstanding"])
async def test_what_nobody_has_goes_to_the_idle_worker(policy: str) -> None:
    """However much that one holds of other prompts, and however little the busy one does."""
    async with cluster(policy=policy) as made:
        busy = await made.join("a")
        idle = await made.join("b", held=[block for number in range(300) for block in chain(f"tree {number}")])

        async def known() -> bool:
            return await made.cached(idle, chain("tree 299")) == 10

        await eventually(known)
        for number in range(8):
            await made.place(chain(f"unique {number}"), exclude_incarnations=["b"])
        assert [(await made.place(chain(f"miss {number}"))).decode.incarnation for number in range(8)] == ["b"] * 8
        assert booked(made, busy)[0] == booked(made, idle)[0] == 8


async def test_many_at_once_lose_nothing() -> None:
    """64 callers place and release while caches change and workers drain, come and go: books and index are true."""
    async with cluster(policy="prefix") as made:
        workers = [await made.join(name) for name in "abcd"]
        for worker in workers:
            await made.followed(worker)
        over = False

        async def call(caller: int) -> None:
            for number in range(12):
                name = f"{caller}-{number}"
                await made.place(chain(f"{number % 5}"), request_id=name)
                await release(made, name)

        async def change() -> None:
            number = 0
            while not over:
                for worker in workers:
                    number += 1
                    worker.store(chain(f"{number % 5}"))
                    if number % 3 == 0 and worker.held:
                        gone = worker.held[-4:]
                        worker.held = [block for block in worker.held if block not in gone]
                        worker.events.publish([BlockRemoved(gone)])
                    worker.member.draining = number % 7 == 0
                    made.service.on_change("updated", worker.member)
                passing = Worker(f"passing {number}")
                made.service.on_change("joined", passing.member)
                await asyncio.sleep(0.005)
                made.service.on_change("left", passing.member)
                await passing.close()

        changing = asyncio.create_task(change())
        async with asyncio.timeout(30):
            await asyncio.gather(*map(call, range(64)))
            over = True
            await changing
        assert [booked(made, worker)[0] for worker in workers] == [0] * 4
        for worker in workers:
            worker.events.publish([BlockStored([worker.member.incarnation.encode() * 16])])
            worker.held.append(worker.member.incarnation.encode() * 16)
        index, fleet = made.service._placer.index, made.service._placer.fleet

        async def true() -> bool:
            rows = {worker: fleet.row(worker.member.incarnation) for worker in workers}
            held = {worker: set(worker.held) for worker in workers}
            return len(index) == len(set().union(*held.values())) and all(
                index.num_blocks(row) == len(held[worker])
                and all(row in index.holders(block) for block in held[worker])
                for worker, row in rows.items()
                if row is not None
            )

        await eventually(true)
