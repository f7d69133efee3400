"""Children that start by a fork of a process that has imported what they need: real processes, cheap imports."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from supervised import Recorder, runs, state, until

from services.forked import ForkServer
from services.supervisor import Child, Supervisor

NAPPER = """
import json, os, subprocess, sys, time
loaded = os.getpid()

def main():
    if "parent" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import time; print('grandchild', flush=True); time.sleep(100)"])
    said = {"loaded": loaded, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0)}
    said |= {"arguments": sys.argv[1:], "env": dict(os.environ)}
    print(json.dumps(said), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if "fail" in sys.argv:
        sys.exit(7)
    time.sleep(100)
"""


def said(seen: Recorder, child: str) -> list[dict[str, Any]]:
    """What the starts of a child told of themselves."""
    return [json.loads(text) for name, text in seen.lines if name == child and text.startswith("{")]


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python finds `napper`, and `lazy`, which takes a minute to import."""
    (tmp_path / "napper.py").write_text(NAPPER)
    (tmp_path / "lazy.py").write_text("import time\ntime.sleep(60)\n" + NAPPER)
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd())), "SHARED": "1"}


@pytest.fixture
async def server(modules: dict[str, str]) -> AsyncIterator[ForkServer]:
    server = ForkServer(("napper",), modules)
    yield server
    server.close()


def child(name: str, server: ForkServer, env: dict[str, str], *arguments: str, module: str = "napper") -> Child:
    return Child(name, [sys.executable, "-m", module, *arguments], env, fork_server=server)


async def test_forks_are_as_programs_started_anew(server: ForkServer, modules: dict[str, str]) -> None:
    seen = Recorder()
    secret = modules | {"SECRET": "of a alone"}
    children = [child("a", server, secret, "serve", "x"), child("b", server, modules, "serve", "y")]
    supervisor = Supervisor(children, seen.event, seen.line)
    await supervisor.start()
    await until(lambda: {("a", "to stderr"), ("b", "to stderr")} <= set(seen.lines))
    (a,), (b,) = said(seen, "a"), said(seen, "b")
    assert a["loaded"] == b["loaded"] not in (a["pid"], b["pid"])
    assert {"a": a["pid"], "b": b["pid"]} == supervisor.pids
    assert a["parent"] == os.getpid() and a["session"] == a["pid"]
    assert a["arguments"] == ["serve", "x"] and b["arguments"] == ["serve", "y"]
    assert a["env"] == secret and b["env"] == modules
    assert Path(f"/proc/{a['pid']}/cmdline").read_bytes().rstrip(b"\0").endswith(b"-m napper serve x")
    assert b"of a alone" not in Path(f"/proc/{b['pid']}/environ").read_bytes()
    os.kill(a["pid"], signal.SIGKILL)
    await until(lambda: len(said(seen, "a")) == 2)
    assert ("exited", {"name": "a", "code": -signal.SIGKILL}) in seen.events
    assert said(seen, "a")[1]["loaded"] == a["loaded"]
    pids = [*supervisor.pids.values(), a["loaded"]]
    await supervisor.stop()
    assert not any(state(pid) for pid in pids)


async def test_exit_statuses_are_told(server: ForkServer, modules: dict[str, str]) -> None:
    seen = Recorder()
    supervisor = Supervisor([child("a", server, modules, "fail")], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: any(kind == "restarted" for kind, _ in seen.events))
    assert ("exited", {"name": "a", "code": 7}) in seen.events
    await supervisor.stop()


async def test_forks_outlive_their_server_and_the_next_has_a_new_one(
    server: ForkServer, modules: dict[str, str]
) -> None:
    seen = Recorder()
    supervisor = Supervisor([child("a", server, modules)], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: said(seen, "a"))
    (a,) = said(seen, "a")
    os.kill(a["loaded"], signal.SIGKILL)
    await supervisor.add(child("b", server, modules))
    await until(lambda: said(seen, "b"))
    assert said(seen, "b")[0]["loaded"] != a["loaded"]
    assert runs(a["pid"]) and not any(kind == "exited" for kind, _ in seen.events)
    await supervisor.stop()


async def test_without_a_server_they_are_programs(modules: dict[str, str]) -> None:
    """It cannot import: who starts in the usual way says why."""
    server, seen = ForkServer(("not_there",), modules), Recorder()
    command = [sys.executable, "-c", "print('as ever', flush=True); import time; time.sleep(100)"]
    supervisor = Supervisor([Child("a", command, modules, fork_server=server)], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: ("a", "as ever") in seen.lines)
    assert any("starts as a new program" in text for _, text in seen.lines)
    await supervisor.stop()


async def test_too_large_an_environment_is_no_reason_not_to_start(server: ForkServer, modules: dict[str, str]) -> None:
    seen = Recorder()
    supervisor = Supervisor([child("a", server, modules | {"LARGE": "x" * 100_000})], seen.event, seen.line)
    supervisor.children[0].env |= {"LARGER": "x" * 100_000}
    supervisor.children[0].command[1:] = ["-c", "print('as ever', flush=True); import time; time.sleep(100)"]
    await supervisor.start()
    await until(lambda: ("a", "as ever") in seen.lines)
    await supervisor.stop()


async def test_a_stop_waits_for_no_import(modules: dict[str, str]) -> None:
    server, seen = ForkServer(("lazy",), modules), Recorder()
    supervisor = Supervisor([child("a", server, modules, module="lazy")], seen.event, seen.line)
    starting = asyncio.ensure_future(supervisor.start())
    await asyncio.sleep(0.5)
    starting.cancel()
    async with asyncio.timeout(30):  # it imports for a minute
        await supervisor.stop()
    assert not supervisor.pids and not any(kind == "started" for kind, _ in seen.events)


async def test_what_a_fork_leaves_behind_is_killed_and_reaped(server: ForkServer, modules: dict[str, str]) -> None:
    seen = Recorder()
    supervisor = Supervisor([child("a", server, modules, "parent")], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: ("a", "grandchild") in seen.lines and said(seen, "a"))
    pid = said(seen, "a")[0]["pid"]
    group = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _group(int(path.name)) == pid]
    assert len(group) == 2
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(state(each) for each in group))  # not even as zombies
    await supervisor.stop()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_forks_die_with_a_killed_supervisor(modules: dict[str, str]) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from services.forked import ForkServer\n"
        "from services.supervisor import Child, Supervisor\n"
        "async def main():\n"
        "    env = dict(os.environ)\n"
        "    a = Child('a', [sys.executable, '-m', 'napper'], env, fork_server=ForkServer(('napper',), env))\n"
        "    s = Supervisor([a], lambda k, /, **f: None, lambda c, t: print(t, flush=True))\n"
        "    await s.start(); await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=modules)
    assert parent.stdout is not None
    told = json.loads(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in (told["pid"], told["loaded"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
