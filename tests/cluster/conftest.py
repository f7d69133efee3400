"""Clusters that several test files share."""

from collections.abc import Iterator

import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with the default model."""
    running = start_cluster(tmp_path_factory.mktemp("cluster"), "--prefill", "1", "--decode", "1")
    yield running
    stop_cluster(running)
