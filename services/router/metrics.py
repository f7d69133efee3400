"""What the router exports."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.admission import Shed
from router.health import Outcome
from router.policy import Way
from router.self_check import Mode

CACHE_STATES = ("known", "unknown", "silent", "refused")
OVERLAPS = ("predicted", "actual", "both")

_PRIORITIES = ("high", "normal", "low")  # below 0, 0, above


def priority_class(priority: int) -> str:
    """A label for a priority, of which there are too many for one each."""
    return _PRIORITIES[1 + (priority > 0) - (priority < 0)]


class RouterMetrics:
    """Counters and gauges of one router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.decision_seconds = Histogram(
            "tandem_router_decision_seconds",
            "Time to place one request",
            registry=registry,
            buckets=(0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01),
        )
        self.overlap = Counter(
            "tandem_router_overlap_blocks",
            "Cached prompt blocks, as predicted, as found, and both",
            ["kind"],
            registry=registry,
        )
        self.prediction_ratio = Histogram(
            "tandem_router_prediction_ratio",
            "Actual through predicted seconds, to the first token (ttft) and for each after it (tpot)",
            ["of"],
            registry=registry,
            buckets=(0.1, 0.25, 0.5, 0.8, 1.25, 2, 4, 10),
        )
        for of in ("ttft", "tpot"):
            self.prediction_ratio.labels(of)
        self.placements = Counter("tandem_router_placements", "Placements by reason", ["reason"], registry=registry)
        for way in Way:
            self.placements.labels(way.value)
        for kind in OVERLAPS:
            self.overlap.labels(kind)
        self.fetches = Counter(
            "tandem_router_fetches", "Placements with a prefix to be fetched from another worker", registry=registry
        )
        self.resyncs = Counter("tandem_router_resyncs", "Snapshots taken of workers' caches", registry=registry)
        self.replays = Counter("tandem_router_replays", "Missing KV events that a worker sent again", registry=registry)
        self.caches = Gauge("tandem_router_caches", "Workers, by what is known of them", ["state"], registry=registry)
        self.precision = Gauge(
            "tandem_router_precision", "Part of the tokens predicted to be cached that were found", registry=registry
        )
        self.recall = Gauge(
            "tandem_router_recall", "Part of the cached tokens found that were predicted", registry=registry
        )
        self.mode = Gauge("tandem_router_mode", "1: what placements go by", ["mode"], registry=registry)
        for mode in Mode:
            self.mode.labels(mode.value)
        for state in CACHE_STATES:
            self.caches.labels(state)
        self.workers = Gauge(
            "tandem_router_workers", "Workers known, by role and model", ["role", "model"], registry=registry
        )
        self.blocks = Gauge("tandem_router_index_blocks", "Distinct KV blocks in the index", registry=registry)
        self.reservations = Gauge("tandem_router_reservations", "Requests under way", registry=registry)
        self.full = Gauge(
            "tandem_router_workers_full", "Decode workers where requests wait for KV blocks", registry=registry
        )
        self.queue_requests = Gauge("tandem_router_queue_requests", "Requests held in the router", registry=registry)
        self.queue_tokens = Gauge("tandem_router_queue_tokens", "Tokens of requests held there", registry=registry)
        self.queue_seconds = Histogram(
            "tandem_router_queue_seconds",
            "Time for which requests were held, of those that were and got their turn",
            ["priority"],
            registry=registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        for name in _PRIORITIES:
            self.queue_seconds.labels(name)
        self.shed = Counter("tandem_router_shed", "Requests refused with 429, by reason", ["reason"], registry=registry)
        for why in Shed:
            self.shed.labels(why.value)
        self.shed_share = Gauge(
            "tandem_router_shed_share",
            "Part of the requests that is refused for the planner",
            ["model"],
            registry=registry,
        )
        self.staleness = Gauge(
            "tandem_router_staleness_seconds",
            "Since another router was heard, of the one silent for longest; 0: there is no other",
            registry=registry,
        )
        self.outcomes = Counter(
            "tandem_router_outcomes",
            "Attempts that ended, by what it says of workers",
            ["outcome"],
            registry=registry,
        )
        for outcome in Outcome:
            self.outcomes.labels(outcome.value)
        self.transfer_faults = Counter(
            "tandem_router_transfer_faults", "Attempts whose prefill worker did not deliver", registry=registry
        )
        self.breakers = Gauge(
            "tandem_router_breakers",
            "Circuit breakers that are not closed, of workers and of (prefill, decode) pairs",
            ["of", "state"],
            registry=registry,
        )
        self.ejected = Gauge(
            "tandem_router_workers_ejected", "Workers that are out, far worse than their peers", registry=registry
        )
        self.ejections = Counter(
            "tandem_router_ejections", "Workers put out, by what was far worse", ["reason"], registry=registry
        )
        for reason in ("faults", "lateness"):
            self.ejections.labels(reason)
        self.stalled = Gauge(
            "tandem_router_workers_stalled", "Workers that make no step though they have work", registry=registry
        )

    def forget(self, model: str, roles: Iterable[str]) -> None:
        """A model is served no more."""
        self.shed_share.remove(model)
        for role in roles:
            self.workers.remove(role, model)
