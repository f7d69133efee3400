"""`tandem up`: a whole cluster on this machine with one command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.weights.resolve import DEFAULT_MODEL, model_name
from services.cluster_state import LEASE_SECONDS, ClusterState
from services.config import (
    ClusterConfig,
    ConfigError,
    GatewayConfig,
    RouterConfig,
    WorkerConfig,
    given,
    is_unspecified,
    load,
)
from services.embedded_state import EmbeddedState
from services.prepare import StartFailed, prepare_model
from services.process import available_cores, stop_signal
from services.running import RunningCluster, announced
from services.supervisor import Child, Supervisor

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_WORKER_ROLES = ("prefill", "decode", "aggregated")
_START_SECONDS = 300.0
_START_ATTEMPTS = 5  # of a child that dies again and again


@dataclass
class UpOptions:
    """What the command line says."""

    prefill: int | None = None
    decode: int | None = None
    aggregated: int = 0
    routers: int = 1
    json: bool = False
    config: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)  # settings of any role, by field name
    role_settings: dict[str, list[str]] = field(default_factory=dict)  # NAME=VALUE, of workers of one role alone


class Output:
    """What the user sees: events as JSON lines on stdout, or coloured log lines and one line when ready."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._console = Console(stderr=True, highlight=False)
        self._colours: dict[str, str] = {}

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something happened."""
        if self._json:
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the cluster goes on
                print(json.dumps({"event": kind, **fields}), flush=True)
        elif kind in ("exited", "restarted", "given_up"):
            details = " ".join(f"{key}={value}" for key, value in fields.items() if key != "name")
            self.line(str(fields["name"]), f"{kind} {details}")

    def line(self, child: str, text: str) -> None:
        """A child printed a line."""
        colour = self._colours.setdefault(child, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._console.print(Text(f"{child:>12} ", style=colour) + Text("| ", style="dim") + Text(text), soft_wrap=True)

    def ready(self, url: str, model: str, pids: dict[str, int]) -> None:
        """The cluster answers."""
        if self._json:
            self.event("ready", url=url, model=model, pids=pids)
            return
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stream": True,
            }
        )
        print(f"ready {url}", flush=True)
        print(f"try:  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


async def up(options: UpOptions) -> None:
    """Runs the cluster until SIGINT or SIGTERM. Raises what the `tandem` command explains to its user."""
    stop = stop_signal()
    output = Output(options.json)
    roles = _roles(options)
    settings, of_roles = _settings(options, roles)  # wrong settings fail before anything starts
    settings["port"] = _free_port(settings["host"], settings["port"])
    model = settings["model"] or DEFAULT_MODEL
    folder = await prepare_model(model, output.event, stop)
    if folder is None:
        return
    settings |= {"model": folder, "model_name": settings["model_name"] or model_name(model, folder)}
    strangers_may_join = bool(settings["state"] and settings["cluster_key"])
    settings["cluster_key"] = settings["cluster_key"] or secrets.token_hex(32)
    embedded = None if settings["state"] else await asyncio.to_thread(EmbeddedState)
    try:
        if embedded is not None:
            settings["state"] = embedded.url
        supervisor = Supervisor(
            _children(roles, _environment(settings, options.config), of_roles), output.event, output.line
        )
        running = RunningCluster(_url(settings), settings["cluster"], settings["state"], settings["cluster_key"])
        with announced(running):
            await _run(settings, supervisor, output, stop, strangers_may_join)
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.close)
        _remove_stale_segments()
        output.event("stopped")


async def _run(
    settings: dict[str, Any],
    supervisor: Supervisor,
    output: Output,
    stop: asyncio.Event,
    strangers_may_join: bool,
) -> None:
    state = ClusterState(settings["state"], settings["cluster"])
    stopped = asyncio.ensure_future(stop.wait())
    ready = asyncio.ensure_future(_start(settings, supervisor, state, strangers_may_join))
    try:
        await asyncio.wait((ready, stopped, supervisor.failed), return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            raise StartFailed(supervisor.failed.result())
        if ready.done():
            output.ready(ready.result(), settings["model_name"], supervisor.pids)
            await stopped  # a child that is given up later was told of; the others go on
    finally:
        stopped.cancel()
        ready.cancel()
        await asyncio.wait((ready,), timeout=1.0)
        await asyncio.gather(supervisor.stop(), state.close())


async def _start(
    settings: dict[str, Any], supervisor: Supervisor, state: ClusterState, strangers_may_join: bool
) -> str:
    """Starts the processes; returns the cluster's URL when it answers. Raises StartFailed or ConnectionError."""
    await state.connect()
    left_over = time.monotonic() + LEASE_SECONDS + 1
    while (others := state.members()) and not strangers_may_join:  # perhaps of a run that was killed a moment ago
        if time.monotonic() > left_over:
            raise StartFailed(
                f"the cluster {settings['cluster']!r} has members already ({', '.join(m.name for m in others)}): "
                "give another name by TANDEM_CLUSTER, or that cluster's key by TANDEM_CLUSTER_KEY to join it"
            )
        await asyncio.sleep(0.1)
    await supervisor.start()
    url = _url(settings)
    await _wait_ready(state, url, supervisor)
    return url


def _url(settings: dict[str, Any]) -> str:
    """Where clients of this machine reach the gateway."""
    host = settings["host"]
    if is_unspecified(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{settings['port']}" if ":" in host else f"http://{host}:{settings['port']}"


async def _wait_ready(state: ClusterState, url: str, supervisor: Supervisor) -> None:
    """Until all children are registered and the gateway says that it is healthy."""
    deadline = time.monotonic() + _START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment

    def healthy() -> bool:
        try:
            with opener.open(url + "/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:  # URLError is one
            return False

    while time.monotonic() < deadline:
        running = supervisor.pids
        registered = {member.pid for member in state.members() if member.host == socket.gethostname()}
        all_there = len(running) == len(supervisor.children) and registered.issuperset(running.values())
        if all_there and await asyncio.to_thread(healthy):
            return
        for child in supervisor.children:
            if child.restarts >= _START_ATTEMPTS:
                raise StartFailed(f"{child.name} died {child.restarts} times at start; see its log lines above")
        await asyncio.sleep(0.1)
    raise StartFailed(f"the cluster was not ready after {_START_SECONDS:.0f} s; see the log lines above")


def _roles(options: UpOptions) -> list[str]:
    """The role of each process; one prefill and one decode worker unless aggregated workers were asked for."""
    default = 0 if options.aggregated else 1
    prefill = default if options.prefill is None else options.prefill
    decode = default if options.decode is None else options.decode
    if min(prefill, decode, options.aggregated) < 0:
        raise StartFailed("--prefill, --decode and --aggregated count workers: none can be negative")
    if decode + options.aggregated == 0:
        raise StartFailed("nobody would decode: give at least --decode 1 or --aggregated 1")
    if options.routers < 1:
        raise StartFailed("nobody would place requests: give at least --routers 1")
    return (
        ["router"] * options.routers
        + ["gateway"]
        + ["prefill"] * prefill
        + ["decode"] * decode
        + ["aggregated"] * options.aggregated
    )


def _settings(options: UpOptions, roles: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the children are told by their environment: what `up` itself needs, and the flags. All is checked.

    Second, by role, what workers of one role alone are told.
    """
    of_roles = {role: _role_settings(role, texts) for role, texts in options.role_settings.items()}
    kinds = (GatewayConfig, RouterConfig, WorkerConfig)
    settings: dict[str, Any] = {}
    for kind in kinds:
        flags = {name: value for name, value in options.flags.items() if name in kind.__struct_fields__}
        config = load(kind, flags, options.config)
        settings |= {name: getattr(config, name) for name in flags}
        if isinstance(config, GatewayConfig):
            shared = ("cluster", "state", "cluster_key", "model", "model_name", "host", "port")
            settings |= {name: getattr(config, name) for name in shared}
        if isinstance(config, WorkerConfig):
            set_by_user = "threads" in given(kind, flags, options.config)
            configs = {
                role: load(WorkerConfig, flags | of_roles.get(role, {}), options.config) for role in _WORKER_ROLES
            }
            computing = sum(configs[role].tensor_parallel for role in roles if role in configs)  # processes
            settings["threads"] = config.threads if set_by_user else max(1, available_cores() // computing)
    return settings, of_roles


def _role_settings(role: str, texts: list[str]) -> dict[str, str]:
    """Settings of NAME=VALUE. Raises ConfigError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in WorkerConfig.__struct_fields__:
            raise ConfigError(f"--{role}-setting {text}: write NAME=VALUE with a setting of workers, as block_size=32")
        if name in ClusterConfig.__struct_fields__ or name in ("role", "model", "model_name"):
            raise ConfigError(f"--{role}-setting {text}: all processes of a cluster have the same {name}")
        found[name] = value
    return found


def _free_port(host: str, port: int) -> int:
    """The port, if it can be used; 0 stands for any. Raises StartFailed."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port"
            ) from error
        return int(probe.getsockname()[1])


def _environment(settings: dict[str, Any], file: Path | None) -> dict[str, str]:
    """Environment of the children: configuration and secrets travel here, where no other user can read them."""
    environment = dict(os.environ)
    environment |= {f"TANDEM_{name.upper()}": str(value) for name, value in settings.items()}
    environment["PYTHONUNBUFFERED"] = "1"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        environment[name] = str(settings["threads"])
    if file is not None:
        environment["TANDEM_CONFIG"] = str(file)
    return environment


def _children(roles: list[str], environment: dict[str, str], of_roles: dict[str, dict[str, Any]]) -> list[Child]:
    counts: dict[str, int] = {}
    children = []
    devices = 0  # given out
    for role in roles:
        number = counts[role] = counts.get(role, -1) + 1
        name = f"{role}-{number}" if number or role in _WORKER_ROLES else role
        command = [sys.executable, "-m", "services.cli", "serve", role]
        own = {f"TANDEM_{setting.upper()}": str(value) for setting, value in of_roles.get(role, {}).items()}
        if role in _WORKER_ROLES:
            own.setdefault("TANDEM_FIRST_DEVICE", str(devices))
            devices += int((environment | own).get("TANDEM_TENSOR_PARALLEL", "1"))
        children.append(Child(name, command, environment | own | {"TANDEM_NAME": name}))
    return children


def _remove_stale_segments() -> None:
    """Shared memory of workers that were killed: its owner held a lock on the first byte as long as it lived."""
    for path in Path("/dev/shm").glob("tandem-kv-*"):
        with contextlib.suppress(OSError), path.open("rb+") as segment:
            fcntl.lockf(segment, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            path.unlink()
