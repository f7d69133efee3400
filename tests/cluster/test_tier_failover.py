"""The Redis beneath the KV service fails over (S18): a tier is away for a while, then the other server has it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.harness import stop_cluster
from cluster.test_tier_faults import BLOCKS, started
from faults_hit import must_hit
from redis_servers import Processes, processes, wait_until


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as found:
        yield found


def test_another_master_has_what_was_kept(servers: Processes, tmp_path: Path) -> None:
    kept = started(tmp_path, "--kv-redis", servers.url)
    try:
        kept.cluster.wait_least("tandem_tier_blocks", BLOCKS / 2, tier="redis")
        old = servers.master()
        servers.kill(old)
        kept.ask()  # while there is none
        wait_until(lambda: servers.master() != old, "another master")
        survivor = servers.client(servers.master())
        assert survivor.dbsize() >= BLOCKS / 2, "the replica had nothing"
        before = kept.cluster.metric("tandem_tier_hit_blocks_total", tier="redis")
        ends = time.monotonic() + 60
        while kept.cluster.metric("tandem_tier_hit_blocks_total", tier="redis") == before:
            must_hit(time.monotonic() < ends, "nothing came from the new master in time")
            kept.ask()
        kept.cluster.wait_idle()
    finally:
        stop_cluster(kept.cluster)
