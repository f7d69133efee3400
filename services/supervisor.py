"""Supervision of child processes: restarts what dies with back-off, stops all in time, leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.forked import ForkedProcess, ForkServer
from services.process import adopt_orphans, die_with_parent

EXIT_CONFIGURATION = 78  # sysexits.h EX_CONFIG: a restart would not help
_BACKOFF = (0.2, 10.0)  # first and longest wait before a restart, seconds
_STABLE_SECONDS = 30.0  # a child that ran so long starts with the first wait again
_STOP_SECONDS = 8.0  # from SIGTERM to SIGKILL
_REAP_SECONDS = (0.01, 1.0)  # between two looks, and in all
_LONGEST_LINE = 1 << 20  # bytes; a longer one is shown in pieces


@dataclass(slots=True)
class Child:
    """One process of the cluster."""

    name: str
    command: list[str]
    env: dict[str, str]
    places: tuple[str, ...] = ()  # members that it has run elsewhere; then it is none itself
    fork_server: ForkServer | None = None  # that starts it, as a fork; else it is a new program
    is_leaving: bool = False  # it is to end, and not to be started again
    has_run: bool = False  # for so long that its configuration cannot be wrong
    is_given_up: bool = False  # as its configuration is wrong
    process: asyncio.subprocess.Process | ForkedProcess | None = None
    restarts: int = 0
    backoff: float = _BACKOFF[0]
    started: float = 0.0
    output: asyncio.Task[None] | None = None


class Supervisor:
    """Runs children until told to stop.

    `event(name, **fields)` is told what happens, `line(child, text)` what they print. Each child leads a process group
    of its own, so a Ctrl-C in the terminal reaches the supervisor alone, and what a child leaves behind goes with it.
    """

    def __init__(self, children: list[Child], event: Callable[..., None], line: Callable[[str, str], None]) -> None:
        self.children = children
        self._event = event
        self._line = line
        self._stop = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why a child is given up

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run."""
        return {
            child.name: child.process.pid
            for child in self.children
            if child.process is not None and child.process.returncode is None
        }

    async def start(self) -> None:
        """Starts all children and watches them. OSError if a command cannot be run."""
        adopt_orphans()  # forks are children of this process then
        for child in self.children:
            await self._start(child)

    async def add(self, child: Child) -> None:
        """Starts one more. OSError if its command cannot be run; nothing is known of it then."""
        self.children.append(child)
        try:
            await self._start(child)
        except OSError:
            self.children.remove(child)
            raise

    def remove(self, child: Child) -> None:
        """Has one end by SIGTERM, however long it takes, and forgets it then."""
        if child.is_given_up:
            self.children.remove(child)
        elif not child.is_leaving:
            child.is_leaving = True
            _terminate(child)

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what remains after 8 s."""
        self._stop.set()  # watchers end with their children; one that is about to spawn sees it
        for child in self.children:
            if child.fork_server is not None:
                child.fork_server.close()
            _terminate(child)
        if self._watchers:
            _, late = await asyncio.wait(self._watchers, timeout=_STOP_SECONDS)
            for child in self.children:
                _kill_group(child)
            if late:
                await asyncio.wait(late, timeout=1.0)
        if outputs := [child.output for child in self.children if child.output is not None]:
            await asyncio.wait(outputs, timeout=1.0)

    async def _start(self, child: Child) -> None:
        first = asyncio.get_running_loop().create_task(self._spawn(child))
        watcher = asyncio.get_running_loop().create_task(self._watch(child, first))
        watcher.add_done_callback(self._watcher_done)
        self._watchers.append(watcher)
        await asyncio.shield(first)  # a caller that is cancelled here leaves no process that nobody knows

    async def _spawn(self, child: Child) -> None:
        child.started = time.monotonic()
        # A pipe of our own: asyncio's would delay the news of an exit until all that the child started has ended, too.
        read, write = os.pipe()
        try:
            child.process = await self._run(child, write)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._event("started", name=child.name, pid=child.process.pid)
        child.output = asyncio.get_running_loop().create_task(self._copy(child.name, read))
        if self._stop.is_set() or child.is_leaving:
            _terminate(child)

    async def _run(self, child: Child, output: int) -> asyncio.subprocess.Process | ForkedProcess:
        if child.fork_server is not None:
            try:
                return await child.fork_server.fork(child.command, child.env, output)
            except OSError as error:
                if self._stop.is_set():
                    raise
                self._line(child.name, f"starts as a new program, not by a fork: {error}")
        return await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=child.env,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    async def _copy(self, name: str, descriptor: int) -> None:
        """Hands on whole lines until the stream ends: a child whose output nobody reads would block."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
        )
        rest = b""
        while piece := await stream.read(1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(name, line.decode(errors="replace").rstrip())
        if rest:
            self._line(name, rest.decode(errors="replace").rstrip())
        transport.close()

    async def _watch(self, child: Child, first: asyncio.Task[None]) -> None:
        await first
        while True:
            assert child.process is not None
            code = await child.process.wait()
            _kill_group(child)
            await _reap_group(child.process.pid)
            self._event("exited", name=child.name, code=code)
            if time.monotonic() - child.started > _STABLE_SECONDS:
                child.backoff = _BACKOFF[0]
                child.has_run = True
            if code == EXIT_CONFIGURATION and not child.has_run and not self._stop.is_set():
                reason = f"{child.name} cannot run with this configuration; see its last lines above"
                child.is_given_up = True
                self._event("given_up", name=child.name, reason=reason)
                self._fail(reason)
                if child.is_leaving:
                    self.children.remove(child)
                return
            if not await self._restart(child):
                if child.is_leaving:
                    self.children.remove(child)
                return

    async def _restart(self, child: Child) -> bool:
        """Starts the child again after its back-off; False if all are to stop."""
        while True:
            if not child.is_leaving:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), child.backoff)
            if self._stop.is_set() or child.is_leaving:
                return False
            child.backoff = min(_BACKOFF[1], 2 * child.backoff)
            try:
                await self._spawn(child)
            except OSError as error:  # no memory or process slot now
                self._line(child.name, f"cannot be started: {error}")
                continue
            child.restarts += 1
            assert child.process is not None
            self._event("restarted", name=child.name, pid=child.process.pid, restarts=child.restarts)
            return True

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def _watcher_done(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._fail(f"supervision failed: {error!r}")


def _terminate(child: Child) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()


def _kill_group(child: Child) -> None:
    """SIGKILL to the child, if it runs, and to what it has started."""
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


async def _reap_group(leader: int) -> None:
    """Reaps what this process has adopted of a child's group, which was killed."""
    pause, most = _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):  # nobody is left
        for _ in range(round(most / pause)):
            _reap_ended(leader)
            await asyncio.sleep(pause)


def _reap_ended(leader: int) -> None:
    """ChildProcessError if nobody is left."""
    while os.waitpid(-leader, os.WNOHANG)[0]:
        pass
