"""The KV service of a simulated cluster: a member that keeps blocks in tiers and computes nothing.

As `services.tier`: what workers tell of their caches it copies into host memory behind their computing, from each of
them part by part with rests while it is busy (`services.tier.keeper`); what lands there is written behind to each
store beneath; what is asked for comes back from the nearest store that has it, through host memory
(`services.tier.below`). Each medium does one thing after another.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.request import HOST, TIERS, BlockRemoved, BlockStored, CacheCleared, KvEvent
from kv_transfer.tiers.announced import Announced
from kv_transfer.tiers.lacking import RANKS, Lacking
from kv_transfer.tiers.policies import POLICIES, evicting
from kv_transfer.tiers.policies.base import Policy
from planner.simulator.clock import Clock
from planner.simulator.demand import Demand
from planner.simulator.foresight import OPTIMUM, Future, Optimum
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.kept import Kept
from planner.simulator.settings import Settings
from planner.simulator.worker import MockWorker

_, DISK, REDIS, _ = TIERS
_PART_BYTES = 8 << 20  # that are copied from a worker at once, as in `services.tier.keeper`
READ_BYTES = 16 << 20  # that are read from a store at once, as in `services.tier.behind`
_REST = 2.0  # times as long as a part took, while the worker is busy
_WAY = 1.25  # times what reading takes, as in `services.tier.below`
_FAILED_SECONDS = 0.5  # of rest after a part that did not come
_ENGINE_BLOCKS = BLOCK_SIZE // 16  # blocks of an engine in one of a simulation


@dataclass(slots=True)
class Store:
    """A tier beneath host memory."""

    kept: Kept
    read_bytes: float
    write_bytes: float
    latency: float
    free_at: float = 0.0  # for reading
    unwritten: OrderedDict[bytes, None] | None = None
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """What is sent to a worker: blocks by the tier that had them, in order, and when all are in host memory."""

    tiers: list[str]
    ready_at: float


class KvService:
    """`number`: its first row in the routers' tables. `tell` gets its KV events."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        clock: Clock,
        workers: Sequence[MockWorker],
        demands: Sequence[Demand],
        tell: Callable[[list[KvEvent]], None],
    ) -> None:
        self.number = number
        self.copied_blocks = 0
        self.given_up_blocks = 0  # that were never copied, as others came
        self._settings, self._timing = settings, settings.timing
        self._clock = clock
        self._workers = workers
        self._tell = tell
        self._origins: dict[bytes, tuple[int, bytes]] = {}
        for demand in demands:
            parent = b""
            for at, block_hash in enumerate(demand.hashes):
                self._origins.setdefault(block_hash, (at * _ENGINE_BLOCKS, parent))
                parent = block_hash
        kv, timing = settings.kv, settings.timing
        self._future = Future(demands) if kv.policy == OPTIMUM else None
        self.host = self._kept(evicting(kv.policy), kv.host_tokens)
        self.stores: dict[str, Store] = {}
        if kv.disk_tokens:
            disk = self._kept(kv.policy, kv.disk_tokens)
            self.stores[DISK] = Store(disk, timing.disk_read_bytes, timing.disk_write_bytes, timing.disk_latency)
        if kv.redis_tokens:
            redis = self._kept("lru", kv.redis_tokens)
            self.stores[REDIS] = Store(redis, timing.redis_bytes, timing.redis_bytes, timing.redis_latency)
        self._announced = Announced([HOST, *self.stores])
        self._lacking = Lacking(kv.host_tokens // BLOCK_SIZE)
        for worker in workers:
            self._lacking.join(str(worker.number), RANKS[worker.role])
        self._copies: set[int] = set()  # workers from which a part is on its way
        self._held = Counter[bytes]()  # blocks that are being read

    def held(self) -> dict[str, list[bytes]]:
        """All blocks, each in its nearest tier."""
        return self._announced.nearest()

    def came(self, demand: Demand) -> None:
        """A request comes to the cluster: only an optimum looks at that."""
        if self._future is not None:
            self._future.came(demand)

    def hear(self, worker: MockWorker, events: Sequence[KvEvent]) -> None:
        """What a worker tells of its cache."""
        name = str(worker.number)
        for event in events:
            match event:
                case BlockStored(hashes):
                    self._lacking.stored(name, hashes)
                case BlockRemoved(hashes):
                    self._lacking.removed(name, hashes)
                case CacheCleared():
                    self._lacking.clear(name)
        if worker.number not in self._copies:
            self._copy(worker)

    def leading(self, hashes: Sequence[bytes], furthest: str) -> int:
        """How many leading blocks are in tiers no further away than that."""
        tiers = [self.host, *(store.kept for store in self._no_further(furthest).values())]
        return next((at for at, each in enumerate(hashes) if not any(each in kept for kept in tiers)), len(hashes))

    def begin(self, hashes: Sequence[bytes], furthest: str, deadline: float) -> Restore:
        """Brings leading blocks into host memory that these tiers have, and holds them there until `end`.

        Of a store whose blocks would not all be read by the deadline, which its first part shows, none.
        """
        stores = self._no_further(furthest)
        there = self.host.leading(hashes)
        self.host.use(hashes[:there])
        tiers, ready_at, read = [HOST] * there, self._clock.now, defaultdict[str, int](int)
        for block_hash in hashes[there:]:
            name = next((name for name, store in stores.items() if block_hash in store.kept), None)
            if name is None:
                break
            tiers.append(name)
            read[name] += 1
        for name, count in read.items():  # one store after the other, as a prefix is read in order
            store = self.stores[name]
            first = max(ready_at, store.free_at) + store.latency + READ_BYTES / store.read_bytes
            rest = (count * self._block_bytes - READ_BYTES) / store.read_bytes
            is_late = first + _WAY * rest > deadline
            ready_at = store.free_at = first if is_late else first + rest
            if is_late:
                del tiers[tiers.index(name) :]
                break
            store.kept.use(hashes[: len(tiers)])
        self._held.update(hashes[: len(tiers)])
        if len(tiers) > there:
            self._store(hashes[there : len(tiers)])
        return Restore(tiers, ready_at)

    def end(self, hashes: Sequence[bytes]) -> None:
        """These are sent, or nobody waits for them."""
        self._held.subtract(hashes)

    # Inside

    def _no_further(self, furthest: str) -> dict[str, Store]:
        return {name: store for name, store in self.stores.items() if TIERS.index(name) <= TIERS.index(furthest)}

    @property
    def _block_bytes(self) -> float:
        return BLOCK_SIZE * self._timing.token_bytes

    def _kept(self, policy: str, tokens: int) -> Kept:
        capacity = tokens // BLOCK_SIZE
        made: Policy = POLICIES[policy](capacity) if self._future is None else Optimum(self._future)
        return Kept(made, capacity, lambda block_hash: self._origins.get(block_hash, (0, b"")))

    def _store(self, hashes: Sequence[bytes]) -> None:
        """Into host memory, and behind that into the stores."""
        stored, gone = self.host.offer(hashes, lambda key: self._held[key] > 0)
        refused = [each for each in hashes if each not in self.host]
        self._lacking.lost(refused)
        for name, store in self.stores.items():
            store.unwritten = store.unwritten or OrderedDict()
            for block_hash in gone:
                store.unwritten.pop(block_hash, None)
            store.unwritten.update(dict.fromkeys(each for each in stored if each not in store.kept))
            self._write(name)
        self._changed(HOST, stored, gone)

    def _changed(self, tier: str, stored: list[bytes], gone: list[bytes]) -> None:
        events: list[KvEvent] = [BlockRemoved(gone)] if gone else []
        events += [BlockStored(stored)] if stored else []
        if told := self._announced.changed(tier, events):
            for event in told:
                match event:
                    case BlockStored(hashes):
                        self._lacking.kept(hashes)
                    case BlockRemoved(hashes):
                        self._lacking.lost(hashes)
            self._tell(told)

    # Writing behind

    def _copy(self, worker: MockWorker) -> None:
        """The next part from a worker, or nothing until it tells that there is something."""
        self.given_up_blocks += self._lacking.given_up
        self._lacking.given_up = 0
        found = self._lacking.take(max(1, int(_PART_BYTES / self._block_bytes)), str(worker.number))
        if found is None:
            self._copies.discard(worker.number)
            return
        self._copies.add(worker.number)
        hashes = found[1]
        held = worker.pool.acquire(hashes)
        parts = max(1.0, len(held) * self._block_bytes / _PART_BYTES)  # a block here is many of an engine's
        part = self._timing.host_latency + min(_PART_BYTES, len(held) * self._block_bytes) / self._timing.host_bytes
        seconds = parts * part if held else 0.0
        if worker.decoding or worker.prompts or worker.waiting:
            seconds *= 1.0 + _REST
        self._clock.after(seconds, self._copied, worker, hashes, held)

    def _copied(self, worker: MockWorker, hashes: list[bytes], held: list[int]) -> None:
        worker.give_back(held)
        landed = hashes[: len(held)]
        if len(landed) < len(hashes):
            self._lacking.failed(str(worker.number), hashes[len(landed) :])
        self.copied_blocks += len(landed)
        self._store(landed)
        self._clock.after(0.0 if landed else _FAILED_SECONDS, self._copy, worker)

    def _write(self, name: str) -> None:
        """The next block to a store, one at a time."""
        store = self.stores[name]
        if store.writes or not store.unwritten:
            return
        store.writes = True
        block_hash, _ = store.unwritten.popitem(last=False)
        seconds = store.latency + self._block_bytes / store.write_bytes
        self._clock.after(seconds, self._written, name, block_hash)

    def _written(self, name: str, block_hash: bytes) -> None:
        store = self.stores[name]
        store.writes = False
        stored, gone = store.kept.offer([block_hash], lambda key: self._held[key] > 0)
        self._changed(name, stored, gone)
        self._write(name)
