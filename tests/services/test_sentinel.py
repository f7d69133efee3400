"""The cluster state behind Sentinel: its URL, and that members and routers go on with another master."""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import Processes, processes, wait_until

from services.cluster_state import ClusterState
from services.config import ConfigError, RouterConfig, load
from services.redis_client import sentinel_url
from services.rpc import cluster_pb2


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as found:
        yield found


def test_url() -> None:
    url = sentinel_url("rediss+sentinel://me:a%2Fb@10.0.0.1:7,[::1]:8,redis/state?db=2&sentinel_password=c%20d")
    assert url.sentinels == [("10.0.0.1", 7), ("::1", 8), ("redis", 26379)]
    assert (url.name, url.tls) == ("state", True)
    assert url.server == {"db": 2, "username": "me", "password": "a/b"}
    assert url.sentinel == {"password": "c d"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://:hunter2@host:7", "must name the master"),
        ("redis+sentinel://:hunter2@host:7/a/b", "must name the master"),
        ("redis+sentinel://:hunter2@host:port/state", "each Sentinel is HOST or HOST:PORT"),
        ("redis+sentinel://:hunter2@host:7,/state", "each Sentinel is HOST or HOST:PORT"),
        ("redis+sentinel://:hunter2@host:70000/state", "each Sentinel is HOST or HOST:PORT"),
        ("redis+sentinel://:hunter2@host:7/state?db=one", "db must be a number"),
        ("redis+sentinel://:hunter2@host:7/state?password=hunter2", "'password' is no option"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(RouterConfig, {"state": url})
    assert "hunter2" not in str(refused.value)


async def test_members_register_with_the_new_master(servers: Processes) -> None:
    """The view of others stays as it is meanwhile."""
    watcher, worker = ClusterState(servers.url, "c"), ClusterState(servers.url, "c")
    changes: list[str] = []
    try:
        await watcher.connect()
        await worker.connect()
        watcher.on_change(lambda change, _: changes.append(change))
        own = cluster_pb2.Member(name="decode-0", role="decode", incarnation=secrets.token_hex(16))
        await worker.register(own)
        old = servers.master()
        servers.kill(old)
        await asyncio.to_thread(wait_until, lambda: servers.master() != old, "another master")
        store = servers.client(servers.master())
        store.flushall()  # what the old one had not told yet is lost
        await asyncio.to_thread(wait_until, lambda: store.exists(f"c:member:{own.incarnation}") == 1, "registered")
        own.draining = True
        await worker.announce()
        async with asyncio.timeout(20):
            while "updated" not in changes:  # heard from the new master
                await asyncio.sleep(0.02)
        assert "left" not in changes
    finally:
        await worker.close()
        await watcher.close()
