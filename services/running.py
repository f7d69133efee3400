"""The clusters that `tandem up` runs on this machine, and how other commands of the same user find them.

Each has a file in the user's cache that nobody else can read, since it holds the cluster key. The file is locked as
long as the cluster runs, so that what a killed one left behind is told from the others.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.weights.resolve import cache_folder
from services.cluster_state import ClusterState
from services.config import ClusterConfig, ConfigError, config_file, load
from services.logs import configure
from services.rpc import cluster_pb2


class RunningCluster(msgspec.Struct, frozen=True):
    """What it takes to join a cluster."""

    url: str  # of its HTTP port
    cluster: str
    state: str
    cluster_key: str
    admin: str = ""  # URL of its admin port
    tls_certificate: str = ""  # absolute path, as of the next two
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""


@contextlib.contextmanager
def announced(running: RunningCluster) -> Iterator[None]:
    """Lets other commands find the cluster. One that cannot be announced runs all the same."""
    path = _folder() / f"{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.unlink(missing_ok=True)  # of a killed process that had this number
        file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(running))
        file.flush()
        partial.rename(path)  # nobody sees it before it is locked
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def of_command(url: str) -> RunningCluster:
    """The cluster that a command is about: at `url`, else that of TANDEM_STATE, else the only one that runs here.

    Raises ConfigError.
    """
    configure("warning", "console")
    config = load(ClusterConfig, {}, config_file())
    if config.state and not url:
        tls = (config.tls_certificate, config.tls_key, config.tls_ca, config.tls_name)
        return RunningCluster(url, config.cluster, config.state, config.cluster_key, "", *tls)
    return find(url)


async def members_of(running: RunningCluster, *roles: str) -> list[cluster_pb2.Member]:
    """Its members of these roles."""
    state = ClusterState(running.state, running.cluster)
    await state.connect()
    try:
        return state.members(*roles)
    finally:
        await state.close()


def find(url: str) -> RunningCluster:
    """The cluster that answers at `url`, or the only one if that is empty. Raises ConfigError."""
    clusters = [cluster for cluster in _running() if not url or cluster.url == url.rstrip("/")]
    if len(clusters) == 1:
        return clusters[0]
    if not clusters:
        where = f" at {url}" if url else ""
        raise ConfigError(
            f"`tandem up` of this user runs no cluster here{where}: start one, or set TANDEM_STATE and "
            "TANDEM_CLUSTER_KEY to those of a cluster elsewhere"
        )
    raise ConfigError(f"several clusters run here, choose one by --url: {', '.join(c.url for c in clusters)}")


def _folder() -> Path:
    return cache_folder() / "running"


def _running() -> list[RunningCluster]:
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(msgspec.json.decode(file.read(), type=RunningCluster))
            else:
                path.unlink(missing_ok=True)  # its cluster was killed
    return found
