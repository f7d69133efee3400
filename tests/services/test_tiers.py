"""What the KV service wants from workers next, and what it says that it has."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import torch

from engine.hashing import test_vector as vector_of_hashes
from engine.kv_cache import KVCacheSpec
from engine.request import BlockRemoved, BlockStored, CacheCleared, Request
from kv_transfer.checksums import page_sums
from kv_transfer.messages import PrefixSource
from kv_transfer.references import BlockRef
from kv_transfer.tiers.announced import Announced
from kv_transfer.tiers.lacking import Lacking
from kv_transfer.tiers.store import Origin
from services.config import ConfigError, KvConfig, bucket_of, load
from services.rpc import cluster_pb2
from services.tier.blocks import KeptBlocks
from services.tier.keeper import Keeper
from services.tier.known_sums import KnownSums
from services.tier.lineage import Lineage
from services.tier.metrics import TierMetrics
from services.worker.engine_thread import EngineThread
from services.worker.notes import Notes


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_oldest_first_in_runs_of_one_worker() -> None:
    wanted = Lacking(100)
    wanted.join("a", 0)
    wanted.join("b", 0)
    wanted.stored("a", hashes(1, 2, 3))
    wanted.stored("b", hashes(4))
    assert wanted.take(2) == ("a", hashes(1, 2))
    assert wanted.take(2, "b") == ("b", hashes(4))
    assert wanted.take(2) == ("a", hashes(3))
    assert wanted.take(2) is None
    wanted.stored("b", hashes(1, 2))  # they are on the way
    assert wanted.take(2, "b") is None
    wanted.lost(hashes(2))  # it did not come
    wanted.stored("b", hashes(1, 2))
    assert wanted.take(2) == ("b", hashes(2))


def test_what_did_not_come_is_tried_again() -> None:
    wanted = Lacking(100)
    wanted.join("a", 0)
    wanted.stored("a", hashes(1, 2, 3, 4))
    assert wanted.take(3) == ("a", hashes(1, 2, 3))
    assert wanted.failed("a", hashes(2, 3)) == 0  # 1 came
    assert wanted.take(9) == ("a", hashes(3, 4, 2))
    assert wanted.failed("a", hashes(2)) == 0
    assert wanted.take(9) == ("a", hashes(2))
    assert wanted.failed("a", hashes(2)) == 1  # the worker will not have it any more
    assert wanted.take(9) is None
    wanted.stored("a", hashes(1, 2))  # of which the first is here
    assert wanted.take(9) == ("a", hashes(2))
    wanted.leave("a")
    assert wanted.failed("a", hashes(2)) == 1 and wanted.take(9) is None


def test_what_is_here_no_more_is_copied_again_when_it_is_wanted() -> None:
    lacking = Lacking(100)
    for worker, rank in (("decode", 2), ("prefill", 0)):
        lacking.join(worker, rank)
    lacking.stored("decode", hashes(1, 2, 3))
    lacking.stored("prefill", hashes(1, 2, 4))
    lacking.kept(hashes(1, 2, 3, 4))
    lacking.lost(hashes(1, 2, 3, 4))
    assert lacking.take(9) is None
    lacking.removed("prefill", hashes(2))
    lacking.wanted(hashes(1, 2, 5))
    assert lacking.take(9, "prefill") == ("prefill", hashes(1)) and lacking.take(9) == ("decode", hashes(2))
    lacking.clear("decode")
    lacking.lost(hashes(1, 2))
    lacking.leave("prefill")
    lacking.wanted(hashes(1, 2, 3, 4))
    assert lacking.take(9) is None


def test_of_several_workers_the_one_that_it_disturbs_least() -> None:
    wanted = Lacking(100)
    wanted.join("decode", 2)
    wanted.join("prefill", 0)
    wanted.stored("decode", hashes(1, 2))
    wanted.stored("prefill", hashes(2, 1))
    wanted.stored("decode", hashes(1, 2))
    assert wanted.take(9) == ("prefill", hashes(2, 1))


def test_what_a_worker_has_no_more_is_not_asked_of_it() -> None:
    wanted = Lacking(3)
    wanted.join("a", 0)
    wanted.join("b", 1)
    wanted.stored("a", hashes(1, 2, 3, 4))
    assert wanted.given_up == 1  # the oldest: it is the next to be overwritten
    wanted.removed("b", hashes(2))  # of which nothing is wanted
    wanted.removed("a", hashes(2))
    wanted.kept(hashes(3))  # it came otherwise
    assert wanted.take(9) == ("a", hashes(4))
    wanted.stored("a", hashes(5))
    wanted.leave("a")
    assert wanted.take(9) is None and not len(wanted)


def test_of_each_block_its_nearest_tier_is_announced() -> None:
    dice, announced = random.Random(1), Announced(("host", "disk"))
    tiers: dict[str, set[bytes]] = {"host": set(), "disk": set()}
    told: dict[bytes, str] = {}
    for _ in range(2000):
        tier, some = dice.choice(("host", "disk")), hashes(*dice.sample(range(40), dice.randint(1, 6)))
        match dice.choice(("stored", "stored", "removed", "removed", "cleared" if dice.random() < 0.05 else "stored")):
            case "stored":
                event: BlockStored | BlockRemoved | CacheCleared = BlockStored(some)
                tiers[tier] |= set(some)
            case "removed":
                event = BlockRemoved(some)
                tiers[tier] -= set(some)
            case _:
                event = CacheCleared()
                tiers[tier].clear()
        for each in announced.changed(tier, [event]):
            match each:
                case BlockStored(block_hashes):
                    assert all(told.get(block_hash) != each.tier for block_hash in block_hashes)
                    told |= dict.fromkeys(block_hashes, each.tier)
                case BlockRemoved(block_hashes):
                    for block_hash in block_hashes:
                        del told[block_hash]
        assert told == dict.fromkeys(tiers["disk"], "disk") | dict.fromkeys(tiers["host"], "host")
        assert told == {block_hash: tier for tier, held in announced.nearest().items() for block_hash in held}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kv_memory_host": "much"}, "not a size"),
        ({"kv_memory_host": "1GiB", "kv_disk": "20GiB"}, "FOLDER:SIZE"),
        ({"kv_memory_host": "1GiB", "kv_disk": "/tmp:much"}, "not a size"),
        ({"kv_disk": "/tmp:1GiB"}, "kv-memory-host"),
        ({"kv_redis": "redis://127.0.0.1:1"}, "kv-memory-host"),
        ({"kv_memory_host": "1GiB", "kv_redis": "http://127.0.0.1:1"}, "must begin with"),
        ({"kv_s3": "s3://kept"}, "kv-memory-host"),
        ({"kv_policy": "fifo"}, "second_hit_lru"),
        ({"kv_tenant_share": "1.5"}, "more than 1"),
        ({"kv_memory_host": "1GiB", "kv_s3": "redis://127.0.0.1:1"}, "s3://BUCKET"),
        ({"kv_memory_host": "1GiB", "kv_s3": "http://127.0.0.1:1"}, "s3://BUCKET"),
        ({"kv_memory_host": "1GiB", "kv_s3": "http://me:secret@127.0.0.1:1/kept"}, "AWS_ACCESS_KEY_ID"),
        ({"kv_memory_host": "1GiB", "kv_s3": "s3://kept/below"}, "s3://BUCKET"),
        ({"kv_memory_host": "1GiB", "kv_s3": "http://[::1/b"}, "s3://BUCKET"),
        ({"kv_memory_host": "1GiB", "kv_s3": "http://host:abc/kept"}, "s3://BUCKET"),
        ({"kv_memory_host": "1GiB", "kv_redis": "redis://host:abc/0"}, "HOST:PORT"),
        ({"kv_memory_host": "infMiB"}, "not a size"),
    ],
)
def test_settings_that_cannot_be(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(KvConfig, flags)
    assert "secret" not in str(raised.value)


def test_where_objects_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert bucket_of("s3://kept") == ("", "kept", "eu-north-1")
    assert bucket_of("s3://kept?region=eu-west-1") == ("", "kept", "eu-west-1")
    assert bucket_of("http://127.0.0.1:9000/kept") == ("http://127.0.0.1:9000", "kept", "eu-north-1")


class Receiver:
    """Takes what is asked of `near`, and never anything of others."""

    def __init__(self, blocks: KeptBlocks, thread: EngineThread) -> None:
        self._blocks = blocks
        self._thread = thread
        self.notes = Notes()
        self.asked: list[str] = []

    async def fetch(self, request: Request, source: PrefixSource) -> None:
        self.asked.append(source.name)
        if source.name == "near":
            self._thread.post(lambda: self._land(request))

    def _land(self, request: Request) -> None:
        """As `KvReceiver` does: who waits for the copy hears of it before its time is noted."""
        self._blocks.on_over(request.request_id, len(request.block_hashes))
        time.sleep(0.02)
        self.notes.spent(request.request_id, "transfer", 0.0, 1.0)


@pytest.fixture
async def keeper() -> AsyncIterator[tuple[Keeper, Receiver]]:
    spec = KVCacheSpec(1, 4, 1, 16, torch.float32)
    blocks = KeptBlocks("model", spec.layout, 64 * spec.block_bytes, None, TierMetrics())
    thread = EngineThread(blocks, lambda output: None, lambda error: None)
    thread.start()
    receiver = Receiver(blocks, thread)
    keeper = Keeper(thread, receiver, None, "", TierMetrics())  # type: ignore[arg-type]
    running = asyncio.get_running_loop().create_task(keeper.run())
    yield keeper, receiver
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    keeper.stop()
    thread.stop()


def member(name: str, blocks: KeptBlocks, events: str = "tcp://127.0.0.1:9") -> cluster_pb2.Member:
    spec = blocks.kv_cache.spec
    card = cluster_pb2.ModelCard(
        fingerprint="model", layout=spec.layout, block_size=spec.block_size, hash_vector=vector_of_hashes()
    )
    return cluster_pb2.Member(
        name=name,
        role="prefill",
        incarnation=name,
        sends=True,
        model=card,
        events_address=events,
        grpc_address="127.0.0.1:9",
    )


async def test_a_worker_that_does_not_answer_holds_up_nobody(keeper: tuple[Keeper, Receiver]) -> None:
    kept, receiver = keeper
    for name in ("far", "near"):
        kept.on_change("joined", member(name, receiver._blocks))
    kept._stored("far", hashes(1))
    await asyncio.sleep(0)
    kept._stored("near", hashes(2))
    async with asyncio.timeout(5):
        while receiver.asked != ["far", "near"]:
            await asyncio.sleep(0.01)
    kept._stored("near", hashes(3))
    async with asyncio.timeout(5):
        while receiver.asked != ["far", "near", "near"]:
            await asyncio.sleep(0.01)


async def test_nothing_is_noted_of_a_copy_that_is_over(keeper: tuple[Keeper, Receiver]) -> None:
    kept, receiver = keeper
    kept.on_change("joined", member("near", receiver._blocks))
    for number in range(3):
        kept._stored("near", hashes(number))
        async with asyncio.timeout(5):
            while kept.num_waiting or kept._over:
                await asyncio.sleep(0.001)
    await kept._thread.call(lambda: None)
    assert receiver.asked == ["near"] * 3 and not receiver.notes._stages


async def test_calls_are_progress_though_there_is_no_step() -> None:
    spec = KVCacheSpec(1, 4, 1, 16, torch.float32)
    blocks = KeptBlocks("model", spec.layout, 64 * spec.block_bytes, None, TierMetrics())
    thread = EngineThread(blocks, lambda output: None, lambda error: None)
    thread.last_progress = 0.0
    calls = [asyncio.ensure_future(thread.call(lambda: 0)) for _ in range(2)]
    await asyncio.sleep(0)  # both are posted: the thread has no idle moment between them
    thread.start()
    await asyncio.gather(*calls)
    progress = thread.last_progress
    thread.stop()
    assert progress > 0


async def test_a_worker_whose_events_cannot_be_followed_ends_nothing(keeper: tuple[Keeper, Receiver]) -> None:
    kept, receiver = keeper
    kept.on_change("joined", member("odd", receiver._blocks, events="nowhere"))
    assert kept.is_of_use
    other = member("other", receiver._blocks)
    other.model.layout = "layers=9"
    kept.on_change("joined", other)
    assert not kept.is_of_use


def test_blocks_are_put_prompt_by_prompt() -> None:
    lineage = Lineage(6)
    lineage.told(BlockStored(hashes(1, 2, 3), 4, hashes(9)[0], b"r" * 16))
    lineage.told(BlockStored(hashes(4, 5), 0, b"q" * 16, b"q" * 16))
    lineage.told(BlockStored(hashes(8)))  # a snapshot's
    assert list(lineage.runs(hashes(1, 2, 3, 4, 5))) == [
        (Origin(4, hashes(9)[0], b"r" * 16), hashes(1, 2, 3)),
        (Origin(0, b"q" * 16, b"q" * 16), hashes(4, 5)),
    ]
    assert [run for _, run in lineage.runs(hashes(2, 1, 8, 3))] == [hashes(2), hashes(1, 8), hashes(3)]
    lineage.told(BlockStored(hashes(6, 7), 2, hashes(5)[0], b"q" * 16))  # the first is forgotten
    assert lineage.arrival(hashes(1)[0]).owner == b"" and lineage.arrival(hashes(7)[0]).position == 3


def test_sums_are_those_with_which_pages_came_until_they_hold_others() -> None:
    pages = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    generations = [1, 1, 1, 1]
    sums = KnownSums(generations.__getitem__)
    came = page_sums(pages, [2, 0])
    sums.landed([BlockRef("mine", 2, 1), BlockRef("mine", 0, 1)], came)
    pages[2, 0, 0] += 1  # damage, which whoever gets the page must see
    assert sums(pages, [0, 2]) == [came[1], came[0]] != page_sums(pages, [0, 2])
    generations[2] += 1  # it holds another block now, which no worker sent
    assert sums(pages, [2, 3]) == page_sums(pages, [2, 3])
    pages[3] += 1
    assert sums(pages, [3]) != page_sums(pages, [3])
