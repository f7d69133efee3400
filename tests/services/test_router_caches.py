"""What a router knows of its workers' caches: events that come, get lost or do not come; and whether it holds."""

import asyncio
import math
import time

import msgspec
import pytest
from router_cluster import BLOCK_SIZE, Cluster, Worker, chain, cluster, eventually
from structlog.testing import capture_logs

from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEventBatch
from router.expected import ExpectedBlocks
from services.router.metrics import CACHE_STATES
from services.rpc import cluster_pb2, router_pb2


async def test_what_is_held_at_the_join_and_what_comes_later() -> None:
    async with cluster() as made:
        worker = await made.join("a", held=chain("old"))

        async def known() -> bool:
            return await made.cached(worker, chain("old")) == 10

        await eventually(known)
        await made.followed(worker)
        worker.store(chain("new"))

        async def known_too() -> bool:
            return await made.cached(worker, chain("new")) == 10

        await eventually(known_too)
        worker.events.publish([CacheCleared()])

        async def cleared() -> bool:
            return await made.cached(worker, chain("new")) == 0

        await eventually(cleared)


async def test_a_lost_batch_is_sent_again() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        before = worker.snapshots, worker.replays
        worker.store_unheard(chain("lost"))
        for number in range(5):
            worker.store(chain(f"later {number}"))

        async def known() -> bool:
            return [await made.cached(worker, chain(n)) for n in ("lost", "later 0", "later 4")] == [10, 10, 10]

        await eventually(known)
        await made.followed(worker)
        assert (worker.snapshots, worker.replays) == (before[0], before[1] + 1)
        assert await made.metric("tandem_router_resyncs_total") == worker.snapshots
        assert await made.metric("tandem_router_replays_total") == worker.replays


async def test_the_loss_of_the_last_batch_is_noticed_by_the_beat() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        worker.store_unheard(chain("lost"))
        worker.events.beat()

        async def known() -> bool:
            return await made.cached(worker, chain("lost")) == 10

        await eventually(known)
        replays = worker.replays
        worker.events.beat()
        await made.followed(worker)
        assert worker.replays == replays


async def test_what_the_worker_keeps_no_more_is_made_good_by_a_snapshot() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        before = worker.snapshots
        worker.store_unheard(chain("lost"))
        worker.events._kept.clear()
        worker.store(chain("last"))

        async def known() -> bool:
            return await made.cached(worker, chain("lost")) == 10

        await eventually(known)
        assert worker.snapshots == before + 1


async def test_late_and_repeated_batches_change_nothing() -> None:
    """What was removed since is not there again."""
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        first = worker.events.sequence + 1
        worker.store_unheard(chain("x"))
        worker.events.publish([BlockRemoved(chain("x"))])
        worker.store(chain("y"))
        for batch in worker.events.since(first - 1) or ():
            worker.events._socket.send_multipart([b"kv", batch])
        worker.store(chain("z"))

        async def known() -> bool:
            return await made.cached(worker, chain("z")) == 10

        await eventually(known)
        assert [await made.cached(worker, chain(name)) for name in "xy"] == [0, 10]


async def test_a_worker_that_refuses_is_asked_again_without_another_event() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        worker.refusals = 2
        worker.store_unheard(chain("lost"))
        worker.store(chain("last"))

        async def known() -> bool:
            return await made.cached(worker, chain("lost")) == 10

        await eventually(known)
        assert worker.refusals == 0


async def test_garbage_among_the_events_changes_nothing() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        for frames in ([b"kv"], [b"kv", b"\xc1"], [b"kv", b"\x93\x01\x02\x03"], [b"kv", b""]):
            worker.events._socket.send_multipart(frames)
        worker.store(chain("after"))

        async def known() -> bool:
            return await made.cached(worker, chain("after")) == 10

        await eventually(known)


async def test_a_worker_that_is_gone_leaves_nothing() -> None:
    """Not its blocks, its load, nor its events that are still under way."""
    async with cluster() as made:
        worker, other = await made.join("a"), await made.join("b")
        await made.followed(worker)
        worker.store(chain("x"))
        for _ in range(5):
            await made.place(exclude_incarnations=["b"])
        worker.store(chain("y"))
        made.service.on_change("left", worker.member)
        worker.store(chain("z"))
        for _ in range(3):
            placement = await made.place(chain("x"))
            assert placement.decode.incarnation == "b"
            assert placement.decode_cached_blocks == 0
        await asyncio.sleep(0.1)  # for events under way
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_index_blocks") == len(set(other.held))
        assert await made.metric("tandem_router_workers", role="decode", model="m") == 1
        assert await made.metric("tandem_router_reservations") == 3


async def test_a_worker_that_is_back_is_not_expected_to_hold_what_it_lost() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.place(chain("x"))
        made.service.on_change("left", worker.member)
        made.service.on_change("joined", worker.member)
        await made.place(chain("x"), request_id="again")
        await made.router.Release(router_pb2.ReleaseRequest(request_id="again"))
        assert await made.metric("tandem_router_overlap_blocks_total", kind="predicted") == 0


async def test_each_worker_is_asked_for_hashes_of_its_own_blocks() -> None:
    """A prefix of 80 tokens here, in five blocks, and of 96 there, in three of twice the size."""
    async with cluster() as made:
        small, large = await made.join("a"), await made.join("b")
        await made.followed(small)
        await made.followed(large)
        large.member.model.layout, large.member.model.block_size = "l2", 2 * BLOCK_SIZE
        sizes = {"l": BLOCK_SIZE, "l2": 2 * BLOCK_SIZE}
        hashes = {layout: block_hashes(range(160), size, layout.encode()) for layout, size in sizes.items()}
        small.store(hashes["l"][:5])
        large.store(hashes["l2"][:3])
        chains = [router_pb2.HashChain(layout=layout, block_hashes=chain) for layout, chain in hashes.items()]
        request = router_pb2.PlaceRequest(request_id="q", chains=chains, prompt_tokens=160)

        async def known() -> bool:
            made.service._placer._expected = ExpectedBlocks()
            placement = await made.router.Place(request, timeout=5)
            return (placement.decode.incarnation, placement.decode_cached_blocks) == ("b", 3)

        await eventually(known)
        request.exclude_incarnations.append("b")
        assert (await made.router.Place(request, timeout=5)).decode_cached_blocks == 5


async def test_events_of_another_incarnation_are_not_the_worker_s() -> None:
    """Its port may be that of another process by now."""
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        stranger = msgspec.msgpack.encode(KvEventBatch("b", worker.events.sequence + 1, [BlockStored(chain("x"))]))
        worker.events._socket.send_multipart([b"kv", stranger])
        worker.store(chain("y"))

        async def known() -> bool:
            return await made.cached(worker, chain("y")) == 10

        await eventually(known)
        made.service.tick(time.monotonic())
        assert await made.metric("tandem_router_index_blocks") == len(set(worker.held))


async def test_a_dead_worker_holds_nothing_up() -> None:
    """One that is registered but does not answer, one whose addresses are malformed, one without events."""
    async with cluster() as made:
        dead = await made.join("a")
        await dead.close()
        for incarnation, address in (("b", "not an address"), ("c", "")):
            member = cluster_pb2.Member(name="bad", role="decode", incarnation=incarnation, events_address=address)
            member.model.block_size = BLOCK_SIZE
            made.service.on_change("joined", member)
        made.service.on_change("joined", cluster_pb2.Member(name="none", role="decode", incarnation="d"))
        worker = await made.join("e")
        await made.followed(worker)
        placed = {(await made.place()).decode.incarnation for _ in range(20)}
        assert placed == {"a", "b", "c", "e"}


async def test_two_workers_of_one_name_are_two() -> None:
    async with cluster() as made:
        first, second = await made.join("a"), await made.join("b")
        assert first.member.name == second.member.name
        await made.followed(first)
        await made.followed(second)
        first.store(chain("x"))

        async def known() -> bool:
            return await made.cached(first, chain("x")) == 10

        await eventually(known)
        assert await made.cached(second, chain("y")) == 0


# Self-check


async def mode_of(made: Cluster) -> str:
    made.service.tick(time.monotonic())
    values = {mode: await made.metric("tandem_router_mode", mode=mode) for mode in ("prefix", "load_only")}
    assert sorted(values.values()) == [0, 1]
    return max(values, key=lambda mode: values[mode])


async def states(made: Cluster) -> dict[str, float]:
    made.service.tick(time.monotonic())
    named = {state: await made.metric("tandem_router_caches", state=state) for state in CACHE_STATES}
    return {state: count for state, count in named.items() if count}


async def test_a_worker_that_hashes_otherwise_is_placed_by_load_alone() -> None:
    async with cluster(fetch_tokens=64) as made:
        with capture_logs() as logs:
            strange = Worker("a")
            strange.held = chain("x")
            strange.member.model.hash_vector = b"otherwise"
            await strange.server.start()
            made.workers.append(strange)
            made.service.on_change("joined", strange.member)
        assert [entry["log_level"] for entry in logs if "hashes blocks otherwise" in entry["event"]] == ["warning"]
        assert await states(made) == {"refused": 1}
        assert await mode_of(made) == "load_only"
        for _ in range(3):
            placement = await made.place(chain("x"))
            assert placement.decode.incarnation == "a" and placement.decode_cached_blocks == 0
            assert not placement.HasField("source")
        assert strange.snapshots == 0
        worker = await made.join("b")
        await made.followed(worker)
        assert await states(made) == {"refused": 1, "known": 1}
        assert await mode_of(made) == "prefix"


async def test_a_worker_whose_events_do_not_come_is_noticed_and_placed_by_what_is_expected() -> None:
    async with cluster() as made:
        worker = await made.join("a", "prefill")
        mute = await made.join("b", "prefill")
        await made.join("d")
        mute.held = chain("z")

        async def all_known() -> bool:
            return await states(made) == {"known": 3}

        await eventually(all_known)
        with capture_logs() as logs:
            for watcher in made.service._watchers._watchers.values():
                watcher._heard -= 100.0  # seconds that pass
            worker.store(chain("y"))
            assert await mode_of(made) == "load_only"

            async def heard() -> bool:
                worker.events.beat()
                return await states(made) == {"known": 1, "silent": 2}

            await eventually(heard)
            assert await mode_of(made) == "prefix"
        said = [entry for entry in logs if "do not come" in entry["event"]]
        assert 2 <= len(said) <= 3  # once for each
        assert sum("by load alone" in entry["event"] for entry in logs) == 1
        assert sum("by cached prefixes again" in entry["event"] for entry in logs) == 1
        first = (await made.place(chain("n"), exclude_incarnations=["a"])).prefill.incarnation
        assert first == "b" and (await made.place(chain("n"))).prefill.incarnation == "b"


async def test_predictions_that_do_not_hold_are_told() -> None:
    async with cluster() as made:
        worker = await made.join("a")
        await made.followed(worker)
        worker.store(chain("x"))

        async def known() -> bool:
            return await made.cached(worker, chain("x")) == 10

        await eventually(known)

        async def run(number: int, **found: int) -> None:
            await made.place(chain("x"), request_id=f"q{number}")
            await made.router.Release(router_pb2.ReleaseRequest(request_id=f"q{number}", **found))

        for number in range(30):
            await run(number)  # no first token: nothing is known of its reuse
        assert await mode_of(made) == "prefix"
        assert math.isnan(await made.metric("tandem_router_precision"))
        for number in range(30):
            await run(number, cached_tokens=16)
        assert await mode_of(made) == "load_only"
        assert await made.metric("tandem_router_precision") == pytest.approx(16 / 159)
        assert await made.metric("tandem_router_recall") == 1
        assert await made.metric("tandem_router_overlap_blocks_total", kind="both") == 30
        for number in range(300):
            await run(number, cached_tokens=159)
        assert await mode_of(made) == "prefix"
