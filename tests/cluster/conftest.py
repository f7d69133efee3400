"""Clusters that several test files share, and which files begin first."""

from collections.abc import Iterator

import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster

# Those that load the machine most run before the cluster that others share is up.
FIRST = (
    "test_parity",
    "test_faults",
    "test_tensor_parallel",
    "test_two_hosts",
    "test_ray",
    "test_bench",
    "test_readme",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Others keep their places behind those."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with the default model."""
    running = start_cluster(tmp_path_factory.mktemp("cluster"), "--prefill", "1", "--decode", "1", "--threads", "1")
    yield running
    stop_cluster(running)
