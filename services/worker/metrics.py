"""What a worker exports: KV blocks, transfers, steps and tokens."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from engine.engine import EngineStats, StepOutput
from engine.step import Step
from kv_transfer.connectors.base import ConnectorCounters
from services.rpc import cluster_pb2

_LINKS = 256  # that are remembered
_LINKS_TOLD = 16  # in each heartbeat
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class WorkerMetrics:
    """The worker's registry; names as in the design, seconds and bytes as units."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter(
            "tandem_prompt_tokens", "Prompt tokens by where their KV came from", ["source"], registry=registry
        )
        self.generated_tokens = Counter("tandem_generated_tokens", "Tokens sampled", registry=registry)
        self.steps = Counter("tandem_engine_steps", "Engine steps by what they held", ["kind"], registry=registry)
        self.preemptions = Counter(
            "tandem_preemptions",
            "Times that a request gave its KV blocks back to another, by what came of it: its KV was fetched from the "
            "KV service (swapped) or computed again (recomputed), or it ended before",
            ["outcome"],
            registry=registry,
        )
        self.step_seconds = Histogram(
            "tandem_engine_step_seconds", "Duration of one engine step", registry=registry, buckets=_SECONDS
        )
        self.transfer_bytes = Counter(
            "tandem_kv_transfer_bytes", "KV bytes that landed, by connector", ["connector"], registry=registry
        )
        self.codec_bytes = Counter(
            "tandem_kv_codec_bytes",
            "KV bytes that came packed by the codec: as they lie in pages (unpacked), as they were on the way (packed)",
            ["form"],
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "tandem_kv_transfer_seconds",
            "From the order to the commit of a KV transfer, prefill included",
            registry=registry,
            buckets=_SECONDS,
        )
        self.exposed_seconds = Histogram(
            "tandem_kv_transfer_exposed_seconds",
            "From the last layer computed to the commit: what of the transfer compute did not hide",
            registry=registry,
            buckets=_SECONDS,
        )
        self.credits_waiting = Gauge(
            "tandem_kv_credits_waiting",
            "Requests whose prefill waits until there are KV blocks for it on the decode worker",
            registry=registry,
        )
        self.credit_wait_seconds = Histogram(
            "tandem_kv_credit_wait_seconds",
            "How long requests waited for KV blocks before their prefill, of those that had to",
            registry=registry,
            buckets=_SECONDS,
        )
        self.transfers = Counter("tandem_kv_transfers", "KV transfers by outcome", ["outcome"], registry=registry)
        self.fetches = Counter(
            "tandem_kv_fetches",
            "Fetches of what a peer has cached, by outcome; all but committed and shared ones are computed here",
            ["outcome"],
            registry=registry,
        )
        self.fetched_blocks = Counter(
            "tandem_kv_fetched_blocks", "KV blocks that came from a peer's cache", registry=registry
        )
        self.connector_fallbacks = Counter(
            "tandem_kv_connector_fallbacks",
            "KV transfers that went on over another connector, as theirs failed",
            ["failed", "next"],
            registry=registry,
        )
        self.refused_frames = Counter(
            "tandem_kv_refused_frames",
            "Frames and pushes of KV transfers that were damaged, stale or unexpected, and changed nothing",
            ["connector", "kind"],
            registry=registry,
        )
        self.blocks = Gauge("tandem_kv_blocks", "KV blocks by state", ["state"], registry=registry)
        self.orphaned = Gauge(
            "tandem_kv_blocks_orphaned", "KV blocks held for no request and no transfer", registry=registry
        )
        self.links: dict[tuple[str, str], tuple[int, int]] = {}  # (peer, connector) -> bytes, transfers; latest last
        self.running = Gauge("tandem_worker_requests", "Requests on this worker by state", ["state"], registry=registry)
        for source in ("computed", "local_cache", "fetched", "tier", "transferred"):
            self.prompt_tokens.labels(source)
        for kind in ("decode", "prefill", "mixed", "empty"):
            self.steps.labels(kind)
        for form in ("unpacked", "packed"):
            self.codec_bytes.labels(form)
        for kind in ("damaged", "unknown"):
            self.refused_frames.labels("control", kind)
        for outcome in ("swapped", "recomputed", "ended"):
            self.preemptions.labels(outcome)
        for outcome in ("committed", "recomputed", "aborted"):
            self.transfers.labels(outcome)
        for outcome in (
            "committed",
            "shared",
            "refused",
            "late",
            "lost",
            "damaged",
            "unreachable",
            "no room",
            "cached",
            "aborted",
        ):
            self.fetches.labels(outcome)

    def watch(self, connector: str, counters: ConnectorCounters) -> None:
        """Exports what this end of a connector refuses, and what its codec saves."""

        def count_unpacked(packed: int, unpacked: int) -> None:
            self.codec_bytes.labels("packed").inc(packed)
            self.codec_bytes.labels("unpacked").inc(unpacked)

        counters.on_refuse = lambda kind: self.refused_frames.labels(connector, kind).inc()
        counters.on_unpack = count_unpacked

    def landed(self, peer: str, connector: str, num_bytes: int) -> None:
        """KV of a transfer has come from `peer`, an incarnation."""
        self.transfer_bytes.labels(connector).inc(num_bytes)
        before, transfers = self.links.pop((peer, connector), (0, 0))
        self.links[peer, connector] = before + num_bytes, transfers + 1
        if len(self.links) > _LINKS:
            del self.links[next(iter(self.links))]

    def latest_links(self) -> list[cluster_pb2.Link]:
        """Those used last. Engine thread."""
        latest = list(self.links.items())[-_LINKS_TOLD:]
        return [
            cluster_pb2.Link(peer=peer, connector=connector, bytes=num_bytes, transfers=transfers)
            for (peer, connector), (num_bytes, transfers) in latest
        ]

    def tell(self, load: cluster_pb2.Load, links: list[cluster_pb2.Link]) -> None:
        """Puts what was counted into a heartbeat."""
        prompts = {s.labels["source"]: int(s.value) for s in _totals(self.prompt_tokens)}
        load.generated_tokens = sum(int(sample.value) for sample in _totals(self.generated_tokens))
        load.computed_tokens, load.cached_tokens = prompts["computed"], prompts["local_cache"]
        load.fetched_tokens, load.restored_tokens = prompts["fetched"], prompts["tier"]
        del load.links[:]
        load.links.extend(links)

    def count_step(self, output: StepOutput) -> None:
        """Books one engine step."""
        self.steps.labels(_kind(output.step)).inc()
        self.step_seconds.observe(output.seconds)
        for outcome, times in output.step.preempted.items():
            self.preemptions.labels(outcome).inc(times)
        for entry in output.step.entries:
            sequence = entry.sequence
            computed = max(0, min(entry.end, sequence.num_prompt_tokens) - entry.start)
            self.prompt_tokens.labels("computed").inc(computed)
            if computed and entry.start == sequence.num_cached_tokens:  # its first chunk
                fetched = "tier" if sequence.fetched_from_tier else "fetched"
                self.prompt_tokens.labels(fetched).inc(sequence.num_fetched_tokens)
                self.prompt_tokens.labels("local_cache").inc(entry.start - sequence.num_fetched_tokens)
        for item in output.outputs:
            self.generated_tokens.inc(len(item.token_ids))

    def set_load(self, stats: EngineStats, orphaned: int) -> None:
        """Sets the gauges."""
        self.running.labels("running").set(stats.running)
        self.running.labels("waiting").set(stats.waiting)
        self.orphaned.set(orphaned)
        for state, count in stats.blocks.items():
            self.blocks.labels(state).set(count)


def _kind(step: Step) -> str:
    """Whether a step computed prompts (or what a preempted sequence had lost), decodes, or both."""
    prompts = sum(e.num_tokens > 1 or e.start < e.sequence.num_prompt_tokens for e in step.entries)
    if not step.entries:
        return "empty"  # it only told what had ended
    return "prefill" if prompts == len(step.entries) else "mixed" if prompts else "decode"


def _totals(counter: Counter) -> Iterator[Sample]:
    """A counter's values, without the times of their beginning."""
    return (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
