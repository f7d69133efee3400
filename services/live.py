"""What the console and `tandem top` show: the state of a cluster, and the last minutes of it, as JSON.

The gateway's admin port gives it at `/api/live`, and once a second as server-sent events at `/api/live/stream`. Times
are seconds. NaN does not exist in JSON: what is not known is null.
"""

from __future__ import annotations

import msgspec

from services.gateway.waterfall import Waterfall

BUCKET_SECONDS = 5.0  # of everything that is told over time
BUCKETS = 60
WINDOW_SECONDS = BUCKET_SECONDS * BUCKETS


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model that this gateway serves, or that workers have all the same."""

    name: str
    state: str  # ready, asleep, waiting for workers or not served here


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it said of itself and as routers see it."""

    name: str
    role: str  # prefill, decode, aggregated or kv
    incarnation: str
    host: str
    model: str
    state: str  # ready, draining, asleep or out
    reason: str  # why routers give it nothing; "" if they do
    running: int  # requests in the batch
    waiting: int
    waiting_for_blocks: int  # requests whose prompt waits for room here
    blocks: int  # of KV, in all
    free_blocks: int
    generated_per_second: float  # tokens
    computed_per_second: float  # prompt tokens
    hit_rate: float | None  # part of the prompt tokens that were cached here or by a peer, in the last minutes
    hits: list[float | None]  # the same for each bucket, oldest first


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """KV on its way from one worker to another. A worker that is gone has no name."""

    source: str  # incarnation
    target: str
    source_name: str
    target_name: str
    connector: str
    bytes_per_second: float
    bytes: int  # since the target's start, as the following
    transfers: int


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """A router. One that does not answer has no policy."""

    name: str
    incarnation: str
    policy: str
    mode: str  # what placements go by: prefix or load_only
    reason: str  # of load_only
    precision: float | None  # of what it predicts to be cached
    recall: float | None
    queued: int  # requests that wait for room
    under_way: int


class GatewayView(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway. `here`: the one whose requests are told."""

    name: str
    incarnation: str
    here: bool


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests of the last minutes; null: there were none."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of this gateway that ended in the last minutes, and what workers do now."""

    running: int
    ended: int
    outcomes: dict[str, int]  # as in tandem_requests_total
    requests_per_second: float  # that ended lately
    generated_per_second: float  # tokens, of all workers
    computed_per_second: float  # prompt tokens, likewise
    kv_bytes_per_second: float  # on all links
    hit_rate: float | None
    ttft: Quantiles
    tpot: Quantiles
    slo_ttft: float | None  # aims; null: none is set
    slo_tpot: float | None
    attainment: float | None  # part of the requests that kept to them, of those that ended well or by our fault


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The same over time: a value for each bucket, oldest first; the last one is under way."""

    bucket_seconds: float
    requests: list[int]
    ttft_p50: list[float | None]
    ttft_p95: list[float | None]
    tpot_p50: list[float | None]
    tpot_p95: list[float | None]
    attainment: list[float | None]
    generated_per_second: list[float | None]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    at: float  # Unix seconds
    cluster: str
    models: list[ModelView]
    connected: bool  # to the cluster state; if not, this is what was known last
    workers: list[WorkerView]
    links: list[LinkView]
    routers: list[RouterView]
    gateways: list[GatewayView]
    traffic: Traffic
    series: Series
    requests: list[Waterfall]  # the latest that got as far as a router, newest first
