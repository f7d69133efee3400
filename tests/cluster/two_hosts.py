"""A prefill and a decode worker in network namespaces of their own, as on two machines; the rest is here."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.harness import PATIENT, Cluster, free_port

from services.embedded_state import find_server
from services.process import die_with_parent

KEY = "two-hosts-" + "k" * 32
_GSO_SEGMENTS = 65_535  # the kernel's own, of which a driver makes packets


def ip(*arguments: str) -> None:
    """Runs iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """Namespaces for `prefill` and `decode`, each with an address, and a bridge to this one."""

    def __init__(self) -> None:
        self._name = f"tdm{os.getpid() % 100_000}"  # names of interfaces are short
        self._net = f"198.18.{os.getpid() % 250}"  # reserved for tests of networks
        self.here = f"{self._net}.1"
        self.addresses = {"prefill": f"{self._net}.2", "decode": f"{self._net}.3"}

    def up(self) -> None:
        """Raises OSError or CalledProcessError where this is not permitted."""
        ip("link", "add", self._name, "type", "bridge")
        ip("addr", "add", f"{self.here}/24", "dev", self._name)
        ip("link", "set", self._name, "up")
        for role, address in self.addresses.items():
            space, outside = self.space(role), self.interface(role)
            ip("netns", "add", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outside, "master", self._name, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        self._let_pass("-I")

    def _let_pass(self, change: str) -> None:
        """A Docker daemon on this machine has all that is forwarded dropped, also between ports of a bridge."""
        rule = ("FORWARD", "-i", self._name, "-o", self._name, "-j", "ACCEPT")
        with contextlib.suppress(FileNotFoundError):  # without iptables nobody has set such rules
            subprocess.run(["iptables", change, *rule], capture_output=True)

    def down(self) -> None:
        """Removes what there is of it."""
        self._let_pass("-D")
        for role in self.addresses:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", self.space(role))
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("link", "del", self._name)

    def space(self, role: str) -> str:
        return f"{self._name}-{role}"

    def interface(self, role: str) -> str:
        """Our end of the cable."""
        return self._name + role[0]

    def bytes_to(self, role: str) -> int:
        """That have gone into the namespace so far."""
        return int(Path(f"/sys/class/net/{self.interface(role)}/statistics/tx_bytes").read_text())

    @contextlib.contextmanager
    def slow(self, source: str, rate: str) -> Iterator[None]:
        """Lets only so much leave `source` a second, such as 1mbit, packet by packet."""
        device = ("dev", "eth0", "root")
        space = ("netns", "exec", self.space(source), "tc", "qdisc")
        # Else 64 kB are one packet, of which the queue has room for a few: streams would lose all that they have sent.
        ip("-n", self.space(source), "link", "set", "eth0", "gso_max_segs", "1")
        ip(*space, "add", *device, "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        try:
            yield
        finally:
            ip(*space, "del", *device)
            ip("-n", self.space(source), "link", "set", "eth0", "gso_max_segs", str(_GSO_SEGMENTS))

    @contextlib.contextmanager
    def cut(self, source: str, target: str) -> Iterator[None]:
        """Drops what `source` sends to `target`, proved."""
        route = ("blackhole", f"{self.addresses[target]}/32")
        ip("-n", self.space(source), "route", "add", *route)
        try:
            found = subprocess.run(
                ["ip", "-n", self.space(source), "route", "get", self.addresses[target]], capture_output=True, text=True
            )
            assert found.returncode != 0, found.stdout
            yield
        finally:
            ip("-n", self.space(source), "route", "del", *route)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Skips the test where namespaces are not permitted."""
    net = Network()
    try:
        try:
            net.up()
        except FileNotFoundError:
            pytest.skip("iproute2 is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces need root and CAP_NET_ADMIN: {error.stderr.strip()}")
        yield net
    finally:
        net.down()


@contextlib.contextmanager
def cluster_on(net: Network, folder: Path, model: Path, *options: str) -> Iterator[Cluster]:
    """Each process started by itself, as on several machines."""
    folder.mkdir(parents=True, exist_ok=True)
    state, http, admin, log = free_port(), free_port(), free_port(), folder / "log"
    env = os.environ | PATIENT | {"TANDEM_CLUSTER_KEY": KEY, "TANDEM_STATE": f"redis://:{KEY}@{net.here}:{state}/0"}
    env |= {"TANDEM_MODEL": str(model), "PYTHONUNBUFFERED": "1"}
    serve = [sys.executable, "-m", "services.cli", "serve"]
    commands = [[find_server(), "--bind", net.here, "--port", str(state), "--requirepass", KEY, "--save", ""]]
    commands += [[*serve, "router", "--name", "router", "--bind", net.here, "--local-prefill-tokens", "0"]]
    commands += [[*serve, "gateway", "--name", "gateway", "--bind", net.here, "--port", str(http)]]
    commands[-1] += ["--admin-port", str(admin)]
    for role, address in net.addresses.items():
        worker = [*serve, role, "--name", f"{role}-0", "--bind", address, *options]
        commands.append(["ip", "netns", "exec", net.space(role), *worker])
    processes: list[subprocess.Popen[str]] = []
    with log.open("w") as output:
        for command in commands:
            ends = functools.partial(die_with_parent, os.getpid())
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env, text=True, preexec_fn=ends)
            processes.append(process)
    cluster = Cluster(processes[-1], f"http://127.0.0.1:{http}", log, model.name, admin=f"http://127.0.0.1:{admin}")
    try:
        deadline = time.monotonic() + 240
        while not _ready(cluster):
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield cluster
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=12)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(cluster: Cluster) -> bool:
    """Whether it answers, and the router has both workers."""
    with contextlib.suppress(httpx.HTTPError):
        if httpx.get(cluster.url + "/health", timeout=30).status_code == 200:
            return cluster.metric("tandem_router_workers") == 2
    return False
