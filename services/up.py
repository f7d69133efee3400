"""`tandem up`: a whole cluster on this machine with one command."""

from __future__ import annotations

import asyncio
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
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from engine.weights.resolve import DEFAULT_MODEL, model_name
from services.cluster_state import ClusterState
from services.config import ClusterConfig, GatewayConfig, RouterConfig, WorkerConfig, load
from services.embedded_state import EmbeddedState
from services.process import stop_signal
from services.supervisor import Child, Supervisor

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_START_SECONDS = 300.0


class StartFailed(Exception):
    """The cluster cannot start; the message says what to do."""


@dataclass
class UpOptions:
    """What the command line says."""

    model: str = DEFAULT_MODEL
    prefill: int | None = None
    decode: int | None = None
    aggregated: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    state: str = ""
    json: bool = False
    config: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of router and workers, by field name


class Output:
    """What the user sees: events as JSON lines on stdout, or coloured log lines and one line when ready."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._console = Console(stderr=True, highlight=False)
        self._colours: dict[str, str] = {}

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something happened."""
        if self._json:
            print(json.dumps({"event": kind, **fields}), flush=True)
        elif kind in ("exited", "restarted"):
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
    """Runs the cluster until SIGINT or SIGTERM. Raises StartFailed or ConfigError."""
    stop = stop_signal()
    output = Output(options.json)
    prefill, decode = _pools(options)
    _check_port(options.host, options.port)
    settings = dict(options.settings)
    workers = prefill + decode + options.aggregated
    settings.setdefault("threads", max(1, (os.cpu_count() or 1) // workers))
    for kind in (GatewayConfig, RouterConfig, WorkerConfig):  # wrong settings fail before anything starts
        _check(kind, settings, options.config)
    folder = await _resolve(options.model, output, stop)
    if folder is None:
        return
    embedded = None if options.state else await asyncio.to_thread(EmbeddedState)
    try:
        url = options.state or (embedded.url if embedded else "")
        environment = _environment(options, settings, folder, url)
        children = _children(options, environment, prefill, decode)
        await _run(options, output, stop, url, environment, Supervisor(children, output.event, output.line), workers)
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.close)
        _remove_stale_segments()
        output.event("stopped")


async def _run(
    options: UpOptions,
    output: Output,
    stop: asyncio.Event,
    url: str,
    environment: dict[str, str],
    supervisor: Supervisor,
    workers: int,
) -> None:
    state = ClusterState(url, environment["TANDEM_CLUSTER"])
    await state.connect()
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await supervisor.start()
        address = f"http://{options.host}:{options.port}"
        ready = asyncio.ensure_future(_wait_ready(state, address, workers))
        await _first(ready, stopped, supervisor.failed)
        if supervisor.failed.done():
            raise StartFailed(supervisor.failed.result())
        if ready.done():
            ready.result()
            output.ready(address, environment["TANDEM_MODEL_NAME"], supervisor.pids)
            await _first(stopped, supervisor.failed)
            if supervisor.failed.done():
                raise StartFailed(supervisor.failed.result())
        ready.cancel()
    finally:
        stopped.cancel()
        await supervisor.stop()
        await state.close()


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _wait_ready(state: ClusterState, address: str, workers: int) -> None:
    """Until all members are registered and the gateway says that it is healthy."""
    deadline = time.monotonic() + _START_SECONDS

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(address + "/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:  # URLError is one
            return False

    while time.monotonic() < deadline:
        if len(state.members("prefill", "decode", "aggregated")) >= workers and await asyncio.to_thread(healthy):
            return
        await asyncio.sleep(0.1)
    raise StartFailed(f"the cluster was not ready after {_START_SECONDS:.0f} s; see the log lines above")


def _pools(options: UpOptions) -> tuple[int, int]:
    """(prefill, decode) workers: one of each unless aggregated workers were asked for."""
    default = 0 if options.aggregated else 1
    prefill = default if options.prefill is None else options.prefill
    decode = default if options.decode is None else options.decode
    if min(prefill, decode, options.aggregated) < 0:
        raise StartFailed("--prefill, --decode and --aggregated count workers: none can be negative")
    if decode + options.aggregated == 0:
        raise StartFailed("nobody would decode: give at least --decode 1 or --aggregated 1")
    return prefill, decode


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port"
            ) from error


def _check(kind: type[ClusterConfig], settings: dict[str, Any], file: Path | None) -> None:
    known = {name: value for name, value in settings.items() if name in kind.__struct_fields__}
    load(kind, known, file)


async def _resolve(model: str, output: Output, stop: asyncio.Event) -> Path | None:
    """The model's folder; conversion runs in a process of its own and shows a bar. None: stopped meanwhile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.weights.resolve",
        model,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    last = ""
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"model {model}", total=1.0)
        stopped = asyncio.ensure_future(stop.wait())
        while True:
            line = asyncio.ensure_future(process.stdout.readline())
            await asyncio.wait({line, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                process.kill()
                await process.wait()
                return None
            if not (text := line.result().decode().rstrip()):
                break
            if text.startswith("progress "):
                _, fraction, what = text.split(" ", 2)
                progress.update(task, completed=float(fraction), description=f"model {model}: {what}")
                output.event("progress", fraction=float(fraction), what=what)
            else:
                last = text
        stopped.cancel()
    error = (await process.stderr.read()).decode(errors="replace").strip()
    if await process.wait() != 0:
        raise StartFailed(error.removeprefix("error: ") or f"the model {model} cannot be prepared")
    return Path(last)


def _environment(options: UpOptions, settings: dict[str, Any], folder: Path, url: str) -> dict[str, str]:
    """Environment of the children: configuration and secrets travel here, where no other user can read them."""
    values = settings | {
        "model": folder,
        "model_name": settings.get("model_name") or model_name(options.model, folder),
        "state": url,
        "host": options.host,
        "port": options.port,
    }
    environment = dict(os.environ)
    environment |= {f"TANDEM_{name.upper()}": str(value) for name, value in values.items() if value is not None}
    environment.setdefault("TANDEM_CLUSTER", "tandem")
    environment.setdefault("TANDEM_CLUSTER_KEY", secrets.token_hex(32))
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(settings["threads"])}
    if options.config is not None:
        environment["TANDEM_CONFIG"] = str(options.config)
    return environment


def _children(options: UpOptions, environment: dict[str, str], prefill: int, decode: int) -> list[Child]:
    roles = ["router", "gateway"] + ["prefill"] * prefill + ["decode"] * decode + ["aggregated"] * options.aggregated
    counts: dict[str, int] = {}
    children = []
    for role in roles:
        number = counts[role] = counts.get(role, -1) + 1
        name = role if role in ("router", "gateway") else f"{role}-{number}"
        command = [sys.executable, "-m", "services.cli", "serve", role]
        children.append(Child(name, command, environment | {"TANDEM_NAME": name}))
    return children


def _remove_stale_segments() -> None:
    """Shared memory of workers that were killed."""
    for path in Path("/dev/shm").glob("tandem-kv-*"):
        pid = path.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
