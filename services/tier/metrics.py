"""What the KV service exports: what a worker exports of its blocks and transfers, and what each tier did."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from prometheus_client import Counter, Gauge

from engine.request import HOST, BlockRemoved, BlockStored, KvEvent
from kv_transfer.tiers.store import StoreCounts
from services.worker.metrics import WorkerMetrics

_DROPPED = ("full", "refused", "gone")


class TierMetrics(WorkerMetrics):
    """Names as in the design."""

    def __init__(self) -> None:
        super().__init__()
        self._counted: dict[str, StoreCounts] = {}
        registry = self.registry
        self.tier_hits = Counter(
            "tandem_tier_hit_blocks", "Blocks that were asked for and found, by tier", ["tier"], registry=registry
        )
        self.tier_misses = Counter(
            "tandem_tier_missed_blocks",
            "Blocks that were asked for and in no tier where they were looked for",
            registry=registry,
        )
        self.tier_stored = Counter(
            "tandem_tier_stored_blocks", "Blocks that were taken in, by tier", ["tier"], registry=registry
        )
        self.tier_evicted = Counter(
            "tandem_tier_evicted_blocks", "Blocks that had to make room, by tier", ["tier"], registry=registry
        )
        self.tier_skipped = Counter(
            "tandem_tier_skipped_blocks",
            "Blocks that a store did not take in: no room, too much under way, or out of order",
            ["tier"],
            registry=registry,
        )
        self.tier_corrupt = Counter(
            "tandem_tier_corrupt_blocks",
            "Blocks of a store that were wrong when they were read, and removed",
            ["tier"],
            registry=registry,
        )
        self.tier_faults = Counter(
            "tandem_tier_faults", "Operations of a store that failed", ["tier"], registry=registry
        )
        self.tier_written = Counter(
            "tandem_tier_written_bytes",
            "Bytes of blocks that a store took in, and of the values that they became in Redis or S3 (packed)",
            ["tier", "form"],
            registry=registry,
        )
        self.tier_prefetched = Counter(
            "tandem_tier_prefetched_blocks",
            "Blocks of requests that waited elsewhere: read into host memory before they were asked for (read), those "
            "of them that were asked for then (used), and not read as too much was to be (dropped)",
            ["outcome"],
            registry=registry,
        )
        self.tier_dropped = Counter(
            "tandem_tier_dropped_blocks",
            "Blocks of workers that were not copied: too many waited (full), they did not come (refused), or their "
            "worker left (gone)",
            ["reason"],
            registry=registry,
        )
        self.tier_blocks = Gauge("tandem_tier_blocks", "Blocks that can be found, by tier", ["tier"], registry=registry)
        self.tier_bytes = Gauge(
            "tandem_tier_bytes", "Bytes of the blocks that can be found, by tier", ["tier"], registry=registry
        )
        self.tier_capacity = Gauge("tandem_tier_capacity_bytes", "Bytes that fit, by tier", ["tier"], registry=registry)
        self.tier_waiting = Gauge(
            "tandem_tier_waiting_blocks", "Blocks of workers that are still to be copied", registry=registry
        )
        self.tier_pins = Gauge("tandem_tier_pins", "Prefixes that are pinned", registry=registry)
        self.tier_pinned = Gauge(
            "tandem_tier_pinned_blocks", "Blocks in host memory that are pinned", registry=registry
        )
        self.tier_pins_refused = Counter(
            "tandem_tier_pin_refused_blocks",
            "Blocks that were not pinned, as the tenant, or all, had pinned as much as they may",
            ["limit"],
            registry=registry,
        )
        for limit in ("tenant", "all"):
            self.tier_pins_refused.labels(limit)
        for counter in (self.tier_hits, self.tier_stored, self.tier_evicted):
            counter.labels(HOST)
        for outcome in ("read", "used", "dropped"):
            self.tier_prefetched.labels(outcome)
        for reason in _DROPPED:
            self.tier_dropped.labels(reason)

    def looked_up(self, found: int, promoted: Mapping[str, int], wanted: int) -> None:
        """A worker asked for `wanted` blocks that it lacks; the first `found` were there, `promoted` from stores."""
        left = found
        for tier, blocks in promoted.items():
            self.tier_hits.labels(tier).inc(min(left, blocks))
            left -= min(left, blocks)
        self.tier_hits.labels(HOST).inc(left)
        self.tier_misses.inc(wanted - found)

    def changed(self, events: Iterable[KvEvent]) -> None:
        """What is in host memory has changed. What is dropped is cleared, so that what is removed made room."""
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    self.tier_stored.labels(HOST).inc(len(block_hashes))
                case BlockRemoved(block_hashes):
                    self.tier_evicted.labels(HOST).inc(len(block_hashes))

    def counted(self, tier: str, counts: StoreCounts) -> None:
        """What a store did since it was opened."""
        before = self._counted.get(tier, StoreCounts())
        self._counted[tier] = replace(counts)
        self.tier_stored.labels(tier).inc(counts.stored - before.stored)
        self.tier_evicted.labels(tier).inc(counts.evicted - before.evicted)
        self.tier_skipped.labels(tier).inc(counts.skipped - before.skipped)
        self.tier_corrupt.labels(tier).inc(counts.corrupt - before.corrupt)
        self.tier_written.labels(tier, "unpacked").inc(counts.written_bytes - before.written_bytes)
        self.tier_written.labels(tier, "packed").inc(counts.packed_bytes - before.packed_bytes)
        self.tier_faults.labels(tier).inc(counts.faults - before.faults)

    def pinned(self, pins: int, blocks: int) -> None:
        """So many prefixes are pinned, and so many blocks of theirs are in host memory."""
        self.tier_pins.set(pins)
        self.tier_pinned.set(blocks)

    def holds(self, tier: str, blocks: int, num_bytes: int, capacity: int) -> None:
        """A tier holds so many blocks, in so many bytes of those that fit."""
        self.tier_blocks.labels(tier).set(blocks)
        self.tier_bytes.labels(tier).set(num_bytes)
        self.tier_capacity.labels(tier).set(capacity)
