"""Targets: servers to compare. One is a URL, or a command that is started for its turn and stopped after it."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import msgspec

from bench.errors import BenchError

_FORM = "write http://host:port or a command with {port}, each perhaps named: 'NAME=tandem up --port {port}'"
_HOST = "127.0.0.1"
_ASK_EVERY = 0.2  # seconds between two looks at a server that starts
_LOOK_EVERY = 0.05  # seconds between two looks at processes that end
_PATIENCE = 2.0  # seconds for one answer while it starts
_AFTER_KILL = 5.0  # seconds for the kernel to end what was killed
_MOST = 1 << 20  # bytes of an answer that are read
_TAIL = 20  # lines of output that an error shows
_STARTED = frozenset({401, 403})  # /v1/models wants a key: it serves


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server that runs at `url`, or the words of a `command` in which {port} stands for its port."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()


def parse_target(text: str) -> Target:
    """Reads "http://...", "NAME=http://...", "NAME=command with {port}" or a bare command. Raises BenchError.

    Without a name, a URL is called by its host and port and a command by its program. A command is split as a shell
    would, but no shell runs it: no variables, no pipes.
    """
    match = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", text.strip(), re.DOTALL)
    assert match is not None
    name, what = match.group(1) or "", match.group(2).strip()
    if re.match(r"https?://", what):
        return Target(name=name or what.split("://", 1)[1].rstrip("/"), url=what)
    try:
        words = tuple(shlex.split(what))
    except ValueError as error:
        raise BenchError(f"target {text!r} is no command ({error}); {_FORM}") from error
    if not any("{port}" in word for word in words):
        raise BenchError(f"target {text!r} is neither a URL nor a command with {{port}}; {_FORM}")
    if shutil.which(words[0]) is None:
        raise BenchError(f"target {text!r}: there is no program {words[0]!r}; {_FORM}")
    return Target(name=name or Path(words[0]).name, command=words)


class Started:
    """`async with Started(target) as url`: the server is ready inside and gone outside, however the block is left.

    Raises BenchError with the end of the command's output when it dies or is not ready within `ready_timeout` seconds,
    or when `stop` is set before; also after the block, if it died there. It is asked to end by SIGTERM to its process
    group, and killed after `kill_wait` seconds. A target that is a URL is left alone.
    """

    def __init__(
        self,
        target: Target,
        ready_timeout: float = 600.0,
        kill_wait: float = 20.0,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._target = target
        self._ready_timeout = ready_timeout
        self._kill_wait = kill_wait
        self._stop = stop
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._keep_log = False

    async def __aenter__(self) -> str:
        if not self._target.command:
            return self._target.url
        port = _free_port()
        self._start(port)
        try:
            await self._until_ready(port)
        except BaseException:
            await self._end()
            raise
        return f"http://{_HOST}:{port}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        failure = None
        if self._process.poll() is not None and (error is None or isinstance(error, BenchError)):
            failure = self._failure(f"{self._ending()} while it was measured")
        await self._end()
        if failure is not None:
            raise failure from error

    def _start(self, port: int) -> None:
        words = [word.replace("{port}", str(port)) for word in self._target.command]
        name = re.sub(r"\W+", "-", self._target.name)
        output, log = tempfile.mkstemp(prefix=f"tandem-bench-{name}-", suffix=".log")
        self._log = Path(log)
        try:
            # A session of its own: Ctrl-C at the terminal is for the load test, which then ends the command.
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            self._log.unlink()
            raise BenchError(f"{self._target.name}: {words[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(output)

    async def _until_ready(self, port: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout
        while reason := await asyncio.to_thread(_unready, port):
            if self._process.poll() is not None:
                raise self._failure(f"{self._ending()} before it was ready")
            if self._stop is not None and self._stop.is_set():
                raise BenchError(f"{self._target.name}: interrupted before it was ready")
            if time.monotonic() > deadline:
                raise self._failure(f"is not ready after {self._ready_timeout:g} s: {reason}")
            await asyncio.sleep(_ASK_EVERY)

    async def _end(self) -> None:
        """Ends the whole process group. Cancelled, it kills at once."""
        try:
            self._signal(signal.SIGTERM)
            await self._gone(self._kill_wait)
        finally:
            self._signal(signal.SIGKILL)
            if not self._keep_log:
                self._log.unlink()
            await self._gone(_AFTER_KILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if _alive(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _gone(self, seconds: float) -> None:
        """Returns when nothing of the group runs any more, at the latest after so many seconds."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None or _alive(self._process.pid):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_EVERY)

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def _failure(self, what: str) -> BenchError:
        self._keep_log = True
        lines = self._log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-_TAIL:]) or "  (nothing)"
        return BenchError(f"{self._target.name} {what}. The end of its output, all of it in {self._log}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _unready(port: int) -> str:
    """Why the server cannot take requests yet; empty if it can. /health may say so, but not all servers have it."""
    try:
        status, _ = _get(port, "/health")
        if status == 503:
            return "/health answers 503"
        status, body = _get(port, "/v1/models")
        if status in _STARTED:
            return ""
        if status != 200:
            return f"/v1/models answers {status}"
        return "" if json.loads(body)["data"] else "/v1/models lists no model"
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer ({error or type(error).__name__})"
    except (ValueError, KeyError, TypeError):
        return "/v1/models is no list of models"


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST)
    finally:
        connection.close()


def _alive(group: int) -> bool:
    """Whether a process of the group runs.

    One that has ended still counts as a member until its parent takes note, which the first process of a container
    may never do; where there is /proc, such are told apart.
    """
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    found = False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            found = True
            if int(of_group) == group and state not in "ZX":
                return True
    return not found
