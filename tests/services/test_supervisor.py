"""Supervision of real, cheap children."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

from services.supervisor import EXIT_CONFIGURATION, Child, Supervisor

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)",
]


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[tuple[str, str]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def line(self, child: str, text: str) -> None:
        self.lines.append((child, text))


def child(name: str, command: list[str]) -> Child:
    return Child(name, command, dict(os.environ))


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_restarts_what_dies_and_prefixes_lines() -> None:
    seen = Recorder()
    supervisor = Supervisor([child("a", SLEEPER), child("b", SLEEPER)], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: {("a", "up"), ("b", "up")} <= set(seen.lines))
    old = supervisor.pids["a"]
    os.kill(old, signal.SIGKILL)
    await until(lambda: any(kind == "restarted" for kind, _ in seen.events))
    assert supervisor.pids["a"] != old
    assert ("exited", {"name": "a", "code": -9}) in seen.events
    pids = list(supervisor.pids.values())
    await supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_stubborn_child_is_killed_in_time() -> None:
    seen = Recorder()
    supervisor = Supervisor([child("s", STUBBORN)], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: ("s", "up") in seen.lines)
    pid = supervisor.pids["s"]
    await asyncio.wait_for(supervisor.stop(), 10)
    assert not psutil.pid_exists(pid)


async def test_wrong_configuration_is_not_restarted() -> None:
    seen = Recorder()
    command = [sys.executable, "-c", f"raise SystemExit({EXIT_CONFIGURATION})"]
    supervisor = Supervisor([child("w", command)], seen.event, seen.line)
    await supervisor.start()
    assert "w cannot run" in await asyncio.wait_for(supervisor.failed, 20)
    assert not any(kind == "restarted" for kind, _ in seen.events)
    await supervisor.stop()


def test_children_die_with_a_killed_supervisor() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from services.supervisor import Child, Supervisor\n"
        "async def main():\n"
        f"    s = Supervisor([Child('a', {SLEEPER!r}, dict(os.environ))], lambda k, /, **f: None, lambda c, t: None)\n"
        "    await s.start(); print(s.pids['a'], flush=True); await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
