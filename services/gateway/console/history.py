"""What workers had counted at times gone by, of which rates are made."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from services.cluster_state import ClusterState
from services.live import BUCKET_SECONDS, BUCKETS
from services.rpc import cluster_pb2

WORKER_ROLES = ("prefill", "decode", "aggregated", "kv")


class Counts(NamedTuple):
    """What a worker has counted since its start."""

    generated: int = 0  # tokens
    computed: int = 0  # prompt tokens
    reused: int = 0  # prompt tokens that were cached, here, by a peer or by the KV service
    links: dict[tuple[str, str], int] = {}  # (incarnation of the source, connector) -> bytes

    @classmethod
    def of(cls, load: cluster_pb2.Load) -> Counts:
        """As its heartbeat says."""
        links = {(link.peer, link.connector): link.bytes for link in load.links}
        reused = load.cached_tokens + load.fetched_tokens + load.restored_tokens
        return cls(load.generated_tokens, load.computed_tokens, reused, links)


class Sample(NamedTuple):
    """All workers at one time, in monotonic seconds."""

    at: float
    workers: dict[str, Counts]  # by incarnation


class History:
    """A sample each five seconds for five minutes, oldest first."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._samples: deque[Sample] = deque(maxlen=BUCKETS + 1)

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            self._samples.append(self.now())
            await asyncio.sleep(BUCKET_SECONDS)

    def now(self) -> Sample:
        """What the latest heartbeats say."""
        workers = self._state.members(*WORKER_ROLES)
        return Sample(time.monotonic(), {worker.incarnation: Counts.of(worker.load) for worker in workers})

    def before(self, now: Sample) -> Sample:
        """The latest sample that is old enough for rates; `now` itself if there is none."""
        old = (sample for sample in reversed(self._samples) if sample.at <= now.at - BUCKET_SECONDS)
        return next(old, now)

    def spans(self, now: Sample) -> list[tuple[Sample, Sample] | None]:
        """Beginning and end of each bucket; None where nothing is known. The last one ends now."""
        samples = [*self._samples, now][-BUCKETS - 1 :]
        known = list(itertools.pairwise(samples))
        return [None] * (BUCKETS - len(known)) + known


def rate(after: float, before: float, seconds: float) -> float:
    """Per second; 0 where nothing is known."""
    return max(0.0, after - before) / seconds if seconds > 0 else 0.0


def hit_rate(spans: Iterable[tuple[Counts, Counts]]) -> float | None:
    """Part of the prompt tokens between these counts, (before, after), that were reused; None: there were none."""
    reused = computed = 0
    for before, after in spans:
        reused += after.reused - before.reused
        computed += after.computed - before.computed
    return reused / (reused + computed) if reused + computed > 0 else None
