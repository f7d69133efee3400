"""`tandem up`: a whole cluster on this machine with one command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import secrets
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.text import Text

from engine.weights.resolve import DEFAULT_MODEL, model_name
from services.cluster_state import LEASE_SECONDS, ClusterState
from services.config import (
    STORES,
    ConfigError,
    GatewayConfig,
    KvConfig,
    PlannerConfig,
    RouterConfig,
    WorkerConfig,
    given,
    is_loopback,
    is_unspecified,
    load,
)
from services.elastic import ChildWorkers, Wishes
from services.embedded_state import EmbeddedState
from services.forked import ForkServer
from services.parts import WORKER_ROLES, ModelFlag, Part, UpOptions, named, parts_of, share_of_tiers
from services.planner.wanted import Wanted
from services.prepare import StartFailed, prepare_model
from services.process import available_cores, stop_signal
from services.ray_plan import RayPlan, RayWorkerPlan, check_address, model_on_nodes, own_address
from services.redis_client import REDIS_ERRORS
from services.rpc import cluster_pb2
from services.running import RunningCluster, announced
from services.supervisor import Child, Supervisor
from services.tls import certificates_of

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_KEYS = ("api_keys", "api_keys_file", "admin_key")  # of the gateway alone
_TLS = ("tls_certificate", "tls_key", "tls_ca", "tls_name")
_KEY_VARIABLES = {f"TANDEM_{name.upper()}" for name in _KEYS}
_WITH_TORCH = ("services.cli", "services.worker.serve")
_WITHOUT_TORCH = ("services.cli", "services.gateway.serve", "services.router.serve")
_START_SECONDS = 300.0
_START_ATTEMPTS = 5  # of a child that dies again and again


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

    def ready(self, url: str, admin: str, models: list[str], pids: dict[str, int], *, needs_key: bool) -> None:
        """The cluster answers at `url`, and its admin side at `admin`."""
        if self._json:
            self.event("ready", url=url, admin=admin, model=models[0], models=models, pids=pids)
            return
        body = json.dumps(
            {
                "model": models[0],
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stream": True,
            }
        )
        print(f"ready {url}", flush=True)
        print(f"console {admin}/", flush=True)
        print(f"metrics {admin}/metrics", flush=True)
        if len(models) > 1:
            print(f"models {', '.join(models)}", flush=True)
        key = '-H "Authorization: Bearer $TANDEM_API_KEY" ' if needs_key else ""
        header = f"{key}-H 'Content-Type: application/json'"
        print(f"try:  curl -N {url}/v1/chat/completions {header} -d '{body}'", flush=True)


async def up(options: UpOptions) -> None:
    """Runs the cluster until SIGINT or SIGTERM. Raises what the `tandem` command explains to its user."""
    stop = stop_signal()
    output = Output(options.json)
    models = [ModelFlag.parse(text) for text in options.models] or [ModelFlag("")]
    parts = parts_of(options, models)
    ray_address = check_address(options.on) if options.on else ""
    settings = _settings(options, parts)  # wrong settings fail before anything starts
    shared = next((name for name in ("kv_redis", "kv_s3") if settings.get(name)), None)
    if shared and not settings["cluster_key"]:
        raise StartFailed(
            f"{shared}: what is kept is sealed by the cluster's key, and without cluster_key each start draws one: "
            "set TANDEM_CLUSTER_KEY, e.g. to `openssl rand -hex 32`"
        )
    if settings["planner"] != "off":
        parts.append(Part("planner", {"planner_actuator": settings["planner_actuator"]}))
    if settings["kv_memory_host"]:
        parts += [Part("kv", model=number) for number in range(len(models))]
    sources = [model.model or settings["model"] or DEFAULT_MODEL for model in models]
    settings["port"] = _free_port(settings["host"], settings["port"], "--port")
    settings["admin_port"] = _free_port(settings["admin_host"], settings["admin_port"], "--admin-port")
    here = [part for part in parts if not (options.on and part.role in WORKER_ROLES)]
    # They import while the model is prepared. They end with this process, or with the supervisor.
    fork_servers = _fork_servers(here, _environment(settings, options.config))
    folders = await _prepare(models, sources, settings, output, stop)
    if folders is None:
        return
    _tell_models(folders, settings, parts)
    strangers_may_join = bool(settings["state"] and settings["cluster_key"])
    settings["cluster_key"] = settings["cluster_key"] or secrets.token_hex(32)
    embedded = None if settings["state"] else await asyncio.to_thread(EmbeddedState, settings.get("bind", "127.0.0.1"))
    try:
        if embedded is not None:
            settings["state"] = embedded.url
        environment = _environment(settings, options.config)
        follows_wishes = settings["planner"] == "act" and settings["planner_actuator"] == "local"
        children: list[Child] = []
        make = _Children(environment, children, fork_servers)
        for name, part in named(here):
            children.append(make.child(name, part))
        if options.on:
            workers = _ray_workers(parts, sources)
            most = settings["planner_workers"] if follows_wishes else None
            plan = RayPlan(ray_address, options.ray_strategy, workers, most)
            children.append(_ray_launcher(plan, environment))
        supervisor = Supervisor(children, output.event, output.line)
        wishes = None
        if follows_wishes and not options.on:
            wanted = Wanted(settings["state"], settings["cluster"])
            wishes = Wishes(wanted, ChildWorkers(supervisor, parts, make.child), settings["planner_workers"])
        running = RunningCluster(
            _url(settings["host"], settings["port"]),
            settings["cluster"],
            settings["state"],
            settings["cluster_key"],
            _url(settings["admin_host"], settings["admin_port"]),
            *(settings[name] for name in _TLS),
        )
        with announced(running):
            await _run(settings, list(folders), supervisor, output, stop, strangers_may_join, wishes)
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.close)
        _remove_stale_segments()
        output.event("stopped")


async def _prepare(
    models: list[ModelFlag], sources: list[str], settings: dict[str, Any], output: Output, stop: asyncio.Event
) -> dict[str, Path] | None:
    """Folders of the models, by their names; None if `stop` was set meanwhile. Raises StartFailed."""
    folders: dict[str, Path] = {}
    for model, source in zip(models, sources, strict=True):
        folder = await prepare_model(source, output.event, stop)
        if folder is None:
            return None
        own = model.name or (settings["model_name"] if len(models) == 1 else "")
        name = own or model_name(source, folder)
        if name in folders:
            raise StartFailed(f"two models are named {name}: give one another name by --model NAME=MODEL")
        folders[name] = folder
    return folders


def _tell_models(folders: dict[str, Path], settings: dict[str, Any], parts: list[Part]) -> None:
    """Each worker has its model, the gateway all of them. Raises StartFailed."""
    (name, folder), *others = folders.items()
    settings |= {"model": folder, "model_name": name}
    if others:
        pairs = [f"{name}={folder}" for name, folder in others]
        if odd := [pair for pair in pairs if "," in pair or pair.count("=") > 1]:
            raise StartFailed(f"{odd[0]}: names and folders of several models hold no comma, and names no =")
        settings["more_models"] = ",".join(pairs)
    every = list(folders.items())
    for part in parts:
        if part.model is not None:
            name, folder = every[part.model]
            part.own |= {"model": folder, "model_name": name}
            if part.role == "kv" and others:
                part.own |= share_of_tiers(settings["kv_memory_host"], settings["kv_disk"], name, len(every))


async def _run(
    settings: dict[str, Any],
    models: list[str],
    supervisor: Supervisor,
    output: Output,
    stop: asyncio.Event,
    strangers_may_join: bool,
    wishes: Wishes | None,
) -> None:
    state = ClusterState(settings["state"], settings["cluster"])
    stopped = asyncio.ensure_future(stop.wait())
    following: asyncio.Task[None] | None = None
    ready = asyncio.ensure_future(_start(settings, supervisor, state, strangers_may_join))
    try:
        await asyncio.wait((ready, stopped, supervisor.failed), return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            raise StartFailed(supervisor.failed.result())
        if ready.done():
            admin = _url(settings["admin_host"], settings["admin_port"])
            needs_key = bool(settings["api_keys"] or settings["api_keys_file"])
            output.ready(ready.result(), admin, models, supervisor.pids, needs_key=needs_key)
            if wishes is not None:
                following = asyncio.ensure_future(wishes.follow())
            await stopped  # a child that is given up later was told of; the others go on
    finally:
        stopped.cancel()
        ready.cancel()
        await asyncio.wait((ready,), timeout=1.0)
        if following is not None:
            following.cancel()
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
    if settings["planner"] == "act":
        await _forget_wishes(settings)
    await supervisor.start()
    url = _url(settings["host"], settings["port"])
    await _wait_ready(state, url, supervisor)
    return url


async def _forget_wishes(settings: dict[str, Any]) -> None:
    """Those of a cluster before this one. Raises ConnectionError."""
    wanted = Wanted(settings["state"], settings["cluster"])
    try:
        await wanted.clear()
    except REDIS_ERRORS as error:
        raise ConnectionError(f"the cluster state does not answer ({error}); is --state right?") from error
    finally:
        await wanted.close()


def _url(host: str, port: int) -> str:
    """Where clients of this machine reach the gateway."""
    if is_unspecified(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
        members = state.members()
        if all(_is_there(child, members) for child in supervisor.children) and await asyncio.to_thread(healthy):
            return
        for child in supervisor.children:
            if child.restarts >= _START_ATTEMPTS:
                raise StartFailed(f"{child.name} died {child.restarts} times at start; see its log lines above")
        await asyncio.sleep(0.1)
    raise StartFailed(f"the cluster was not ready after {_START_SECONDS:.0f} s; see the log lines above")


def _is_there(child: Child, members: list[cluster_pb2.Member]) -> bool:
    """Whether the child, or who it has run elsewhere, is registered."""
    if child.places:
        return {member.name for member in members}.issuperset(child.places)
    pids = {member.pid for member in members if member.host == socket.gethostname()}
    return child.process is not None and child.process.returncode is None and child.process.pid in pids


def _settings(options: UpOptions, parts: list[Part]) -> dict[str, Any]:
    """What all children are told by their environment: what `up` itself needs, and the flags. All is checked."""
    settings: dict[str, Any] = {}
    for kind in (GatewayConfig, RouterConfig, KvConfig, PlannerConfig, WorkerConfig):
        flags = {name: value for name, value in options.flags.items() if name in kind.__struct_fields__}
        config = load(kind, flags, options.config)
        settings |= {name: getattr(config, name) for name in flags}
        if isinstance(config, GatewayConfig):
            shared = ("cluster", "state", "cluster_key", "model", "model_name", "host", "port", "admin_host", *_KEYS)
            settings |= {name: getattr(config, name) for name in shared}
            if certificates_of(config) is not None:  # TlsError: what the children would say, each for itself
                settings |= {name: str(Path(getattr(config, name)).absolute()) for name in _TLS[:3]}
            settings |= {name: settings.get(name) or getattr(config, name) for name in _TLS}
            chosen = "admin_port" in given(kind, flags, options.config)
            settings["admin_port"] = config.admin_port if chosen or _is_free(config) else 0
        if isinstance(config, PlannerConfig):
            # It costs memory and a share of a core, so it is there where somebody has asked for it.
            is_chosen = "planner" in given(kind, flags, options.config)
            settings |= {"planner": config.planner if is_chosen else "off", "planner_workers": config.planner_workers}
            by_default = "local" if config.planner == "act" else "none"
            is_chosen = "planner_actuator" in given(kind, flags, options.config)
            settings["planner_actuator"] = config.planner_actuator if is_chosen else by_default
        if isinstance(config, KvConfig):
            settings |= {name: getattr(config, name) for name in ("kv_memory_host", *STORES)}
        if isinstance(config, WorkerConfig):
            set_by_user = "threads" in given(kind, flags, options.config)
            workers: dict[int | None, list[WorkerConfig]] = {}  # by model
            for part in parts:
                if part.role in WORKER_ROLES:
                    worker = load(WorkerConfig, flags | part.own | {"role": part.role}, options.config)
                    workers.setdefault(part.model, []).append(worker)
            if settings["kv_memory_host"]:
                for of_model in workers.values():
                    _check_kept(of_model)
            computing = sum(worker.tensor_parallel for of_model in workers.values() for worker in of_model)  # processes
            # Of other machines' cores the user decides.
            share = config.threads if set_by_user or options.on else max(1, available_cores() // computing)
            settings["threads"] = share
            if options.on:
                chosen = "bind" in given(kind, flags, options.config)
                settings["bind"] = config.bind if chosen else own_address(options.on)
                _check_state(config.state, settings["bind"])
    return settings


def _check_state(state: str, bind: str) -> None:
    """Raises ConfigError if workers on other machines cannot reach the cluster state."""
    parts = urlsplit(state)
    if state and not is_loopback(bind) and (parts.scheme == "unix" or is_loopback(parts.hostname or "localhost")):
        raise ConfigError("state: workers run on other machines and cannot reach it: name an address of this machine")


def _check_kept(workers: list[WorkerConfig]) -> None:
    """The KV service waits for a worker that it can copy from. Raises ConfigError if none will come."""
    if all(worker.role == "aggregated" and worker.tensor_parallel > 1 for worker in workers):
        raise ConfigError(
            "kv_memory_host: the KV service cannot copy from aggregated workers of several ranks: leave it out"
        )


def _is_free(config: GatewayConfig) -> bool:
    """Whether no other cluster of this machine has the usual admin port, and this one does not use it otherwise."""
    try:
        return config.port != config.admin_port == _free_port(config.admin_host, config.admin_port, "")
    except StartFailed:
        return False


def _free_port(host: str, port: int, flag: str) -> int:
    """The port, if it can be used; 0 stands for any. Raises StartFailed."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"port {port} of {host} cannot be used ({error.strerror}): choose another with {flag}"
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


def _imports(role: str) -> tuple[str, ...]:
    """Who computes imports torch, the others do not."""
    return _WITH_TORCH if role in (*WORKER_ROLES, "kv") else _WITHOUT_TORCH


def _fork_servers(parts: list[Part], environment: dict[str, str]) -> dict[tuple[str, ...], ForkServer]:
    """For the processes of these parts, by what they import."""
    return {
        modules: ForkServer(modules, _without_keys(environment)) for modules in {_imports(part.role) for part in parts}
    }


class _Children:
    """Makes the processes' descriptions. Each worker has the first devices that none of the `living` has."""

    def __init__(
        self, environment: dict[str, str], living: list[Child], fork_servers: dict[tuple[str, ...], ForkServer]
    ) -> None:
        self._environment = environment
        self._living = living  # the supervisor's list, which those who ended have left
        self._fork_servers = fork_servers

    def child(self, name: str, part: Part) -> Child:
        """Of this name."""
        role = part.role
        command = [sys.executable, "-m", "services.cli", "serve", role]
        own = {f"TANDEM_{setting.upper()}": str(value) for setting, value in part.own.items()}
        if role in WORKER_ROLES:
            own.setdefault("TANDEM_FIRST_DEVICE", str(self._free(len(_devices(self._environment | own)))))
        whole = self._environment | own | {"TANDEM_NAME": name}
        env = whole if role == "gateway" else _without_keys(whole)
        return Child(name, command, env, fork_server=self._fork_servers.get(_imports(role)))

    def _free(self, count: int) -> int:
        """The first of so many devices; more than there are count round."""
        taken = [_devices(child.env) for child in self._living if child.command[-1] in WORKER_ROLES]
        return next(
            first
            for first in itertools.count()
            if all(first >= other.stop or first + count <= other.start for other in taken)
        )


def _devices(environment: dict[str, str]) -> range:
    """That a worker of this environment has."""
    first = int(environment.get("TANDEM_FIRST_DEVICE", "0"))
    return range(first, first + int(environment.get("TANDEM_TENSOR_PARALLEL", "1")))


def _ray_workers(parts: list[Part], sources: list[str]) -> list[RayWorkerPlan]:
    """Each finds its model itself, by the name that it has on its node."""
    workers = []
    for name, part in named(parts):
        if part.role in WORKER_ROLES and part.model is not None:
            own = {setting: str(value) for setting, value in part.own.items() if setting != "model"}
            workers.append(RayWorkerPlan(name, part.role, model_on_nodes(sources[part.model]), own))
    return workers


def _ray_launcher(plan: RayPlan, environment: dict[str, str]) -> Child:
    command = [sys.executable, "-m", "services.ray_launcher", msgspec.json.encode(plan).decode()]
    return Child("ray", command, _without_keys(environment), tuple(worker.name for worker in plan.workers))


def _without_keys(environment: dict[str, str]) -> dict[str, str]:
    return {variable: value for variable, value in environment.items() if variable not in _KEY_VARIABLES}


def _remove_stale_segments() -> None:
    """Shared memory of workers that were killed: its owner held a lock on the first byte as long as it lived."""
    for path in Path("/dev/shm").glob("tandem-kv-*"):
        with contextlib.suppress(OSError), path.open("rb+") as segment:
            fcntl.lockf(segment, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            path.unlink()
