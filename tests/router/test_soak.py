"""Thirty simulated hours of two routers: workers come and go, caches fill and evict; nothing grows."""

import gc
import random
from collections import deque
from types import FunctionType, ModuleType

import numpy as np

from engine.hashing import block_hashes
from engine.request import BlockRemoved, BlockStored, CacheCleared
from router.placer import Placer
from router.self_check import ReuseCheck
from router.shared_load import SharedLoad
from router.snapshot import Ask

HOURS = 30
STEP = 40.0  # seconds; in each a worker leaves and another one joins
PLACED = 3  # requests of a step
WORKERS = 8
BLOCK = 16
CACHE = 400  # blocks of a worker
LEASE = 60.0
STRANGERS = (ModuleType, type, FunctionType, np.dtype)


def reachable(*roots: object) -> int:
    """Objects and bytes of arrays that these hold."""
    seen: set[int] = set()
    waiting: list[object] = list(roots)
    count = 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, STRANGERS):
            continue
        seen.add(id(found))
        count += 1 + (found.nbytes if isinstance(found, np.ndarray) else 0)
        waiting += gc.get_referents(found)
    return count


class Router:
    """One of two, with all that is kept between requests."""

    def __init__(self, name: str, policy: str, other: str) -> None:
        self.placer = Placer(policy=policy, local_prefill_tokens=32, fetch_tokens=256, seed=1)
        self.shared = SharedLoad(name, self.placer)
        self.shared.join(other, 0.0)
        self.check = ReuseCheck()

    def join(self, worker: str, prefills: bool) -> None:
        fleet = self.placer.fleet
        row = fleet.join(worker)
        fleet.set(row, ready=True, prefills=prefills, decodes=not prefills, layout=fleet.layout("l"), block_size=BLOCK)
        fleet.set(row, sends=True, fetches=True, prefill_rate=np.nan, fetch_rate=np.nan)

    def told(self, worker: str, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        row = self.placer.fleet.row(worker)
        if row is not None:
            before = [CacheCleared()] if cleared else []
            self.placer.told(row, [*before, BlockRemoved(removed), BlockStored(stored)])

    def tick(self, now: float) -> None:
        self.placer.tick(now)
        self.shared.tick(now)
        self.check.tick(now)
        while self.placer.index.sweep():
            pass


class Cluster:
    """Two routers, the caches of their workers, and the requests that are under way."""

    def __init__(self, policy: str) -> None:
        self.rng = random.Random(1)
        self.routers = [Router("a", policy, "b"), Router("b", policy, "a")]
        self.caches: dict[str, dict[bytes, None]] = {}
        self.under_way: deque[tuple[int, tuple[str, int]]] = deque()
        self.number = 0
        for _ in range(WORKERS):
            self.join()

    def join(self) -> None:
        self.number += 1
        name = f"{self.number:032x}"
        self.caches[name] = {}
        for router in self.routers:
            router.join(name, prefills=self.number % 2 == 0)

    def step(self, now: float) -> None:
        leaving = next(iter(self.caches))
        del self.caches[leaving]
        for router in self.routers:
            router.placer.leave(leaving)
        self.join()
        for _ in range(PLACED):
            self.place(now)
        for teller, hearer in (self.routers, self.routers[::-1]):
            message = teller.shared.message(now)
            if message is not None and self.rng.random() > 0.05:  # some get lost
                hearer.shared.take_in(message, now)
        for router in self.routers:
            router.tick(now)

    def place(self, now: float) -> None:
        self.number += 1
        prompt = [self.rng.randrange(20), *range(15), *[self.number] * BLOCK * self.rng.randrange(1, 40)]
        hashes = block_hashes(prompt, BLOCK, b"root")
        chosen, key = self.rng.randrange(2), (f"{self.number}", 0)
        router = self.routers[chosen]
        placed = router.placer.place(
            key, Ask(len(prompt), 100), [("l", hashes)], list(self.caches)[:1], now=now, lease=LEASE
        )
        router.shared.booked(key, [("l", hashes)])
        worker = bytes(router.placer.fleet.table["worker"][placed.decision.computing]).decode()
        self.store(worker, hashes)
        self.under_way.append((chosen, key))
        if len(self.under_way) > 10:
            chosen, key = self.under_way.popleft()
            if self.rng.random() > 0.05:  # some gateways die
                booked = self.routers[chosen].placer.reservations.release(*key)
                self.routers[chosen].shared.released(key, b"report")
                if booked is not None:
                    self.routers[chosen].check.observe(booked.predicted_tokens, 16, now)

    def store(self, worker: str, hashes: list[bytes]) -> None:
        cache, cleared = self.caches[worker], self.rng.random() < 0.01
        if cleared:
            cache.clear()
        stored = [block_hash for block_hash in hashes if block_hash not in cache]
        cache.update(dict.fromkeys(stored))
        removed = list(cache)[: max(0, len(cache) - CACHE)]
        for block_hash in removed:
            del cache[block_hash]
        for router in self.routers:
            router.told(worker, stored, [block for block in removed if block not in stored], cleared)


def test_nothing_grows_in_thirty_hours() -> None:
    cluster, sizes = Cluster("prefix"), []
    steps = int(HOURS * 3600 / STEP)
    for number in range(steps):
        cluster.step(number * STEP)
        if number % (steps // 30) == 0:
            sizes.append(reachable(*cluster.routers))
    assert max(sizes[20:]) <= 1.1 * max(sizes[5:20])
    for router in cluster.routers:
        truth: set[bytes] = set().union(*cluster.caches.values())
        assert len(router.placer.index) == len(truth)
        for worker, cache in cluster.caches.items():
            row = router.placer.fleet.row(worker)
            assert row is not None and router.placer.index.num_blocks(row) == len(cache)
        assert len(router.placer.fleet.table) <= 2 * 16
        router.placer.tick(1e9)
        assert len(router.placer.reservations) == 0
        assert router.placer.fleet.table[["requests", "prefill_tokens", "decode_tokens"]].tolist() == [
            (0, 0.0, 0.0)
        ] * len(router.placer.fleet.table)
