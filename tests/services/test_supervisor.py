"""Supervision of real, cheap children."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from supervised import Recorder, runs, until

from services.supervisor import EXIT_CONFIGURATION, Child, Supervisor

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)",
]


def child(name: str, command: list[str]) -> Child:
    return Child(name, command, dict(os.environ))


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
    assert not any(runs(pid) for pid in pids)


async def test_a_stubborn_child_is_killed_in_time() -> None:
    seen = Recorder()
    supervisor = Supervisor([child("s", STUBBORN)], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: ("s", "up") in seen.lines)
    pid = supervisor.pids["s"]
    await asyncio.wait_for(supervisor.stop(), 10)
    assert not runs(pid)


async def test_the_wait_before_a_restart_doubles_and_ends_with_stop() -> None:
    seen = Recorder()
    crasher = child("c", [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    waits = []

    def event(kind: str, /, **fields: Any) -> None:
        seen.event(kind, **fields)
        if kind == "exited":
            waits.append(crasher.backoff)

    supervisor = Supervisor([crasher], event, seen.line)
    await supervisor.start()
    await until(lambda: len(waits) == 4)
    assert [later / earlier for earlier, later in itertools.pairwise(waits)] == [2, 2, 2]
    crasher.backoff = 1000.0
    await until(lambda: len(waits) == 5)
    await asyncio.wait_for(supervisor.stop(), 10)  # amid a long wait
    assert supervisor.pids == {}


async def test_stop_amid_a_start_leaves_no_process() -> None:
    seen = Recorder()
    supervisor = Supervisor([child(str(i), SLEEPER) for i in range(12)], seen.event, seen.line)
    starting = asyncio.ensure_future(supervisor.start())
    await until(lambda: bool(seen.events))
    starting.cancel()
    await supervisor.stop()
    started = [fields["pid"] for kind, fields in seen.events if kind == "started"]
    assert started and not any(runs(pid) for pid in started)


async def test_what_a_child_started_goes_with_it() -> None:
    seen = Recorder()
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(p.pid, flush=True); time.sleep(100)"
    )
    supervisor = Supervisor([child("p", [sys.executable, "-c", code])], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: bool(seen.lines))
    grandchild = int(seen.lines[0][1])
    await supervisor.stop()
    await until(lambda: not runs(grandchild))


async def test_lines_of_any_length_and_bytes_do_not_block_a_child() -> None:
    seen = Recorder()
    code = (
        "import sys, time\n"
        "sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\xff\\nlast'); sys.stdout.flush()\n"
        "time.sleep(100)"
    )
    supervisor = Supervisor([child("l", [sys.executable, "-c", code])], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: sum(text.count("x") for _, text in seen.lines) == 3_000_000)
    await supervisor.stop()
    assert seen.lines[-1] == ("l", "last")


async def test_wrong_configuration_is_not_restarted() -> None:
    seen = Recorder()
    command = [sys.executable, "-c", f"raise SystemExit({EXIT_CONFIGURATION})"]
    supervisor = Supervisor([child("w", command)], seen.event, seen.line)
    await supervisor.start()
    assert "w cannot run" in await asyncio.wait_for(supervisor.failed, 20)
    assert not any(kind == "restarted" for kind, _ in seen.events)
    await supervisor.stop()


async def test_one_more_that_cannot_be_started_can_be_tried_again() -> None:
    recorder = Recorder()
    supervisor = Supervisor([child("a", SLEEPER)], recorder.event, recorder.line)
    await supervisor.start()
    with pytest.raises(OSError):
        await supervisor.add(child("b", ["/nowhere"]))
    assert [each.name for each in supervisor.children] == ["a"]
    await supervisor.add(child("b", SLEEPER))
    assert set(supervisor.pids) == {"a", "b"}
    await supervisor.stop()


async def test_what_has_run_before_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration was right once, so that what is wrong may pass."""
    monkeypatch.setattr("services.supervisor._STABLE_SECONDS", 0.5)
    seen = Recorder()
    code = f"import time; time.sleep(1); raise SystemExit({EXIT_CONFIGURATION})"
    supervisor = Supervisor([child("w", [sys.executable, "-c", code])], seen.event, seen.line)
    await supervisor.start()
    await until(lambda: any(kind == "restarted" for kind, _ in seen.events))
    assert not supervisor.failed.done()
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
    assert runs(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
