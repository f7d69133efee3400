"""The cluster state in containers, under a Sentinel: it goes and comes back while a cluster serves."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from cluster.clients import Clients
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from images.compose import docker, docker_folder, redis_image
from redis_servers import Servers, wait_until

from services.rpc import router_pb2, router_pb2_grpc
from services.rpc_server import make_channel
from services.running import find, members_of
from services.security import key_of

testcontainers = pytest.importorskip("testcontainers.core.container", reason="pip install 'tandem-serve[dev]'")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

MEMBERS = 5  # gateway, two routers, two workers
OPTIONS = ("--routers", "2", "--aggregated", "2", "--threads", "1", "--dummy-seed", "1", "--kv-memory", "64MiB")


class Containers(Servers):
    """In the network of this machine: a Sentinel tells addresses that clients must reach, too."""

    def __init__(self, folder: Path, image: str) -> None:
        super().__init__(folder)
        self._image = image
        self._containers: dict[int, testcontainers.DockerContainer] = {}

    def start(self, port: int) -> None:
        """A new container, or the one that was killed."""
        if found := self._containers.get(port):
            found.get_wrapped_container().start()
            return
        kind = [] if port in self.ports else ["--sentinel"]
        container = testcontainers.DockerContainer(self._image, network_mode="host")
        container.with_command(["redis-server", f"/data/{port}.conf", "--dir", "/tmp", *kind])
        container.with_volume_mapping(str(self.folder), "/data", "rw")
        self._containers[port] = container.start()

    def kill(self, port: int) -> None:
        """Waits for its end."""
        container = self._containers[port].get_wrapped_container()
        container.kill()
        container.wait()

    def close(self) -> None:
        """Removes all."""
        for container in self._containers.values():
            container.stop(force=True)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    with docker(docker_folder(tmp_path_factory)) as environment, pytest.MonkeyPatch.context() as patch:
        # Its own container that would clean up after a killed test has an image that may not be had.
        patch.setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
        patch.setenv("DOCKER_CONFIG", environment["DOCKER_CONFIG"])
        folder = tmp_path_factory.mktemp("redis")
        os.chmod(folder, 0o777)  # the Sentinel writes its file, as another user
        found = Containers(folder, redis_image(environment))
        try:
            found.start_all()
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def cluster(servers: Containers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = str(tiny_model(folder / "tiny"))
    running = start_cluster(folder, "--state", servers.url, *OPTIONS, model=model)
    yield running
    stop_cluster(running)


def test_no_request_fails_while_the_state_does(cluster: Cluster, servers: Containers) -> None:
    """It is restarted, emptied, and fails over: everybody registers again, and routers know the same afterwards."""
    wait_until(lambda: _agree(cluster, servers), "the cluster is whole")
    with Clients(cluster) as clients:
        clients.wait(8)
        before, store = servers.master(), servers.client(servers.master())
        run = store.info("server")["run_id"]
        servers.kill(before)
        servers.start(before)
        wait_until(lambda: servers.client(before).info("server")["run_id"] != run, "the server is another one")
        clients.wait(8)
        wait_until(lambda: _agree(cluster, servers), "the cluster is whole after a restart")

        servers.client(servers.master()).flushall()
        clients.wait(8)
        wait_until(lambda: _agree(cluster, servers), "the cluster is whole after it was emptied")

        before = servers.master()
        servers.kill(before)
        wait_until(lambda: servers.master() != before, "the Sentinel names another master")
        clients.wait(8)
        wait_until(lambda: _agree(cluster, servers), "the cluster is whole after a failover")
    assert set(clients.statuses) == {200}, clients.statuses
    cluster.wait_idle()
    wait_until(lambda: {each.reservations for each in _statuses(cluster)} == {0}, "nothing is booked any more")


def _agree(cluster: Cluster, servers: Servers) -> bool:
    """Whether all members are in the store, and both routers hear each other and know the same of the same workers."""
    members = sum(1 for _ in servers.client(servers.master()).scan_iter("tandem:member:*"))
    statuses = _statuses(cluster)
    caches = [dict(each.caches) for each in statuses]
    return (
        members == MEMBERS
        and len(statuses) == 2
        and all(each.routers == 1 and each.staleness_seconds < 2 for each in statuses)
        and all(each.get("known") == 2 for each in caches)
    )


def _statuses(cluster: Cluster) -> list[router_pb2.StatusReply]:
    async def ask() -> list[router_pb2.StatusReply]:
        running = find(cluster.url)
        found = []
        for router in await members_of(running, "router"):
            async with make_channel(router.grpc_address, key_of(running)) as channel:
                stub = router_pb2_grpc.RouterStub(channel)
                found.append(await stub.Status(router_pb2.StatusRequest(), timeout=10))
        return found

    with suppress(grpc.aio.AioRpcError, ConnectionError):
        return asyncio.run(ask())
    return []
