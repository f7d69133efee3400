"""A Ray cluster of several nodes on this machine, each of which can be killed with all that runs on it."""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CPUS = 2  # of each node
_PERIOD = "RAY_health_check_period_ms"


class RayNodes:
    """A head node and others. Ray's token keeps strangers out, as it does by default."""

    def __init__(self, count: int, client_port: int) -> None:
        from ray.cluster_utils import Cluster

        each: dict[str, Any] = {"num_cpus": CPUS, "object_store_memory": 80 << 20}
        head = each | {"ray_client_server_port": client_port, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(count - 1):
            self._cluster.add_node(wait=False, **each)
        self._cluster.wait_for_nodes()
        self.address = self._cluster.address
        self.client_address = f"ray://127.0.0.1:{client_port}"
        self.head = self._raylet(self._cluster.head_node)
        self.raylets = {self._raylet(node): node for node in self._cluster.list_all_nodes()}

    @staticmethod
    def _raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def of(self, pid: int) -> int:
        """The node, told by its raylet's pid, that the process runs on."""
        while pid not in self.raylets:
            pid = _parent(pid)
            assert pid > 1, "no process of a Ray node"
        return pid

    def kill(self, raylet: int) -> None:
        """SIGKILL to a node's every process at once, as when its machine is lost."""
        gone = [raylet, *_descendants(raylet)]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node = self.raylets.pop(raylet)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all nodes."""
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(count: int, client_port: int) -> Iterator[RayNodes]:
    """Skips the test where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:  # to be imported below, as it reads its settings then
        pytest.skip("Ray is not installed: pip install 'tandem-serve[ray]'")
    folder = tempfile.mkdtemp(prefix="ray")  # a short path: sockets lie in it
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,  # where Ray notes the address of the cluster of this machine, too
        _PERIOD: os.environ.get(_PERIOD, "600"),  # a node that is lost is given up after 3 s rather than 15
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        nodes = RayNodes(count, client_port)
        try:
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes
        finally:
            nodes.close()
            shutil.rmtree(folder, ignore_errors=True)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                found += [child, *_descendants(child)]
    return found
