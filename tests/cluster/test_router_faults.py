"""Workers that die every 2 s, a Redis that is emptied and lost: no request fails, and routers know the truth after."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.test_routers import Clients, ask, wait_for
from cluster.tiny import tiny_model
from store import Store

from services.rpc import worker_pb2, worker_pb2_grpc
from services.rpc_server import make_channel
from services.running import find, members_of
from services.security import key_of

ROUTERS = ("router", "router-1")
WORKERS = ("aggregated-0", "aggregated-1", "aggregated-2")
OPTIONS = ("--aggregated", "3", "--routers", "2", "--threads", "1", "--dummy-seed", "1", "--kv-blocks", "120")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Iterator[Cluster]:
    """Small caches, so that blocks are evicted all the time."""
    folder = tmp_path_factory.mktemp("faults")
    options = (*OPTIONS, "--max-model-len", "400", "--state", store.url)
    environment = {"TANDEM_WORKER_WAIT": "60"}
    running = start_cluster(folder, *options, model=str(tiny_model(folder / "tiny")), env=environment)
    yield running
    stop_cluster(running)


async def held(cluster: Cluster) -> int:
    """Distinct blocks that the workers hold, once all of them are in Redis: it was emptied, or they just started."""
    running = find(cluster.url)
    until = time.monotonic() + 60
    while len(workers := await members_of(running, "aggregated")) < len(WORKERS):
        assert time.monotonic() < until, f"only {len(workers)} workers are in Redis"
        await asyncio.sleep(0.1)
    hashes: set[bytes] = set()
    for worker in workers:
        async with make_channel(worker.grpc_address, key_of(running)) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            hashes.update((await stub.CacheSnapshot(worker_pb2.CacheSnapshotRequest(), timeout=30)).block_hashes)
    return len(hashes)


def kill_worker(cluster: Cluster, name: str) -> None:
    """SIGKILL; if it has just died it is not started again yet, and that will do."""
    while not cluster.events.empty():
        event = cluster.events.get()
        if event.get("event") == "started":
            cluster.pids[str(event["name"])] = int(str(event["pid"]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(cluster.pids[name], signal.SIGKILL)


def wait_whole(cluster: Cluster) -> None:
    for router in ROUTERS:
        wait_for(cluster, "tandem_router_workers", len(WORKERS), seconds=180, worker=router)


def wait_truth(cluster: Cluster) -> None:
    """Until both routers know of as many blocks as there are."""
    truth = asyncio.run(held(cluster))
    assert truth > 0
    for router in ROUTERS:
        wait_for(cluster, "tandem_router_index_blocks", truth, worker=router)
        wait_for(cluster, "tandem_router_reservations", 0, worker=router)


def test_workers_die_every_two_seconds(cluster: Cluster) -> None:
    with Clients(cluster) as clients:
        clients.wait(20)
        for number in range(4):
            kill_worker(cluster, WORKERS[number % 3])
            time.sleep(2)
        wait_whole(cluster)
        clients.wait(20)
    assert set(clients.statuses) == {200}
    wait_truth(cluster)


def test_redis_is_emptied(cluster: Cluster, store: Store) -> None:
    wait_whole(cluster)
    with Clients(cluster) as clients:
        clients.wait(8)
        for _ in range(3):
            store.empty()
            clients.wait(8)
    assert set(clients.statuses) == {200}
    wait_truth(cluster)


def test_redis_is_lost_and_comes_back(cluster: Cluster, store: Store) -> None:
    wait_whole(cluster)
    with Clients(cluster) as clients:
        clients.wait(8)
        store.stop()
        until = time.monotonic() + 5  # longer than all leases
        while time.monotonic() < until:
            clients.wait(4)
        store.start()
        clients.wait(20)
        wait_whole(cluster)
    assert set(clients.statuses) == {200}
    wait_truth(cluster)
    assert ask(cluster, 1).status_code == 200
