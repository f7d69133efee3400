"""Supervision of child processes: restarts what dies with back-off, stops all in time, leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.embedded_state import die_with_parent

EXIT_CONFIGURATION = 78  # sysexits.h EX_CONFIG: a restart would not help
_BACKOFF = (0.2, 10.0)  # first and longest wait before a restart, seconds
_STABLE_SECONDS = 30.0  # a child that ran so long starts with the first wait again
_STOP_SECONDS = 8.0  # from SIGTERM to SIGKILL


@dataclass(slots=True)
class Child:
    """One process of the cluster."""

    name: str
    command: list[str]
    env: dict[str, str]
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    backoff: float = _BACKOFF[0]
    started: float = 0.0
    output: list[asyncio.Task[None]] = field(default_factory=list)


class Supervisor:
    """Runs children until told to stop.

    `event(name, **fields)` is told what happens, `line(child, text)` what they print.
    """

    def __init__(self, children: list[Child], event: Callable[..., None], line: Callable[[str, str], None]) -> None:
        self._children = children
        self._event = event
        self._line = line
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it cannot go on

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run."""
        return {child.name: child.process.pid for child in self._children if child.process is not None}

    async def start(self) -> None:
        """Starts all children and watches them."""
        for child in self._children:
            await self._spawn(child)
            self._watchers.append(asyncio.get_running_loop().create_task(self._watch(child)))

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what remains after 8 s."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        running = [c.process for c in self._children if c.process is not None and c.process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if running:
            waits = [asyncio.ensure_future(process.wait()) for process in running]
            await asyncio.wait(waits, timeout=_STOP_SECONDS)
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        for child in self._children:
            for task in child.output:
                task.cancel()

    async def _spawn(self, child: Child) -> None:
        child.started = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child.env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._event("started", name=child.name, pid=child.process.pid)
        child.output = [asyncio.get_running_loop().create_task(self._copy(child, child.process.stdout))]

    async def _copy(self, child: Child, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while line := await stream.readline():
            self._line(child.name, line.decode(errors="replace").rstrip())

    async def _watch(self, child: Child) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            self._event("exited", name=child.name, code=code)
            if code == EXIT_CONFIGURATION:
                if not self.failed.done():
                    self.failed.set_result(f"{child.name} cannot run with this configuration; see its last lines above")
                return
            if time.monotonic() - child.started > _STABLE_SECONDS:
                child.backoff = _BACKOFF[0]
            await asyncio.sleep(child.backoff)
            child.backoff = min(_BACKOFF[1], 2 * child.backoff)
            child.restarts += 1
            await self._spawn(child)
            self._event("restarted", name=child.name, pid=child.process.pid, restarts=child.restarts)
