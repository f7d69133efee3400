"""Two Redis servers under a Sentinel, which come and go."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from cluster.harness import free_port

from services.embedded_state import find_server

NAME = "state"  # of the master, for the Sentinel
PASSWORD = "only the cluster knows it"


class Servers:
    """Servers that are named by their port. They keep nothing on disk: whoever is started again is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_port(), free_port()
        self._sentinel_port = free_port()

    @property
    def url(self) -> str:
        """Of the cluster state; the first Sentinel that it names is not there."""
        password = PASSWORD.replace(" ", "%20")
        return f"redis+sentinel://:{password}@127.0.0.1:{free_port()},127.0.0.1:{self._sentinel_port}/{NAME}"

    def configurations(self) -> dict[int, str]:
        """By port: the servers, the second one a replica of the first, and then the Sentinel."""
        first, second = self.ports
        usual = (
            f'bind 127.0.0.1\nsave ""\nrequirepass "{PASSWORD}"\nmasterauth "{PASSWORD}"\nrepl-diskless-sync-delay 0\n'
        )
        watch = (
            f"bind 127.0.0.1\nsentinel monitor {NAME} 127.0.0.1 {first} 1\n"
            f'sentinel auth-pass {NAME} "{PASSWORD}"\n'
            f"sentinel down-after-milliseconds {NAME} 1500\nsentinel failover-timeout {NAME} 3000\n"
        )
        texts = {first: usual, second: f"{usual}replicaof 127.0.0.1 {first}\n", self._sentinel_port: watch}
        return {port: f"port {port}\n{text}" for port, text in texts.items()}

    def start(self, port: int) -> None:
        """Starts a server, or the Sentinel, as its configuration file says."""
        raise NotImplementedError

    def kill(self, port: int) -> None:
        """SIGKILL."""
        raise NotImplementedError

    def start_all(self) -> None:
        """Until the Sentinel knows both. It comes last, as it asks a master for its replicas every 10 s only."""
        texts = self.configurations()
        for port in (*self.ports, self._sentinel_port):
            (self.folder / f"{port}.conf").write_text(texts[port])
        for port in self.ports:
            self.start(port)
        replica = self.client(self.ports[1])
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", "the replica has it all")
        self.start(self._sentinel_port)
        with redis.Redis(port=self._sentinel_port) as sentinel:
            wait_until(lambda: len(sentinel.sentinel_slaves(NAME)) == 1, "the Sentinel finds the replica")

    def client(self, port: int) -> redis.Redis:
        """Of one server."""
        return redis.Redis(port=port, password=PASSWORD)

    def master(self) -> int:
        """Port of the server that the Sentinel names."""
        with redis.Redis(port=self._sentinel_port) as sentinel:
            return int(sentinel.sentinel_get_master_addr_by_name(NAME)[1])


class Processes(Servers):
    """On this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int) -> None:
        """A process."""
        kind = () if port in self.ports else ("--sentinel",)
        command = (find_server(), str(self.folder / f"{port}.conf"), "--dir", str(self.folder), *kind)
        self._processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self, port: int) -> None:
        """Waits for its end."""
        self._processes[port].kill()
        self._processes[port].wait()

    def close(self) -> None:
        """Ends all."""
        for port in self._processes:
            self.kill(port)


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """All of them run, until the end of the block."""
    found = Processes(folder)
    try:
        found.start_all()
        yield found
    finally:
        found.close()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Fails after `seconds`; a server that is away, or does not know yet, counts as no."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(redis.RedisError, KeyError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not so after {seconds} s: {what}"
        time.sleep(0.1)
