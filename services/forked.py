"""Processes of a cluster that start by a fork of one that has imported everything."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from services.fork_server import MESSAGE_BYTES, Start
from services.process import die_with_parent

_LONGEST_PID = 32  # bytes
_END_LOOKS, _END_PAUSE = 100, 0.01  # seconds between two; one second in all


class ForkedProcess:
    """A child of this process that another one forked. As asyncio's `Process`, as far as a supervisor needs it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._over = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Until it has ended; its exit status, or the negative number of the signal that ended it."""
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM. ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGTERM)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._over.set()


class ForkServer:
    """Runs services/fork_server.py with `modules` imported, in the environment `env`, which should hold no secrets.

    It starts at once; a fork waits until it has imported. If it dies, the next fork starts it again.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "services.fork_server", *modules]
        self._env = dict(env)
        self._turn = asyncio.Lock()  # so that a message never waits for room in the socket
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._start()

    async def fork(self, command: Sequence[str], env: Mapping[str, str], output: int) -> ForkedProcess:
        """A process that runs `command` in `env`, and writes to the file `output`. This process is its parent.

        `command` is `python -m MODULE ARGUMENT...`, where the module has a `main()`. Raises OSError if there is no
        process, as the server cannot import, or dies.
        """
        _, _, module, *arguments = command
        message = msgspec.json.encode(Start(module, arguments, dict(env), os.getpid()))
        if len(message) > MESSAGE_BYTES:
            raise OSError(f"an environment of {len(message):,} bytes is too large for a fork")
        async with self._turn:
            pid = await self._ask(message, output)
            if not pid:  # it dies, or did a moment ago: the next one is asked
                await self._end()
                pid = await self._ask(message, output)
        if not pid:
            raise OSError("the fork server dies")
        return ForkedProcess(pid)

    async def _ask(self, message: bytes, output: int) -> int:
        """The pid of a fork, or 0."""
        if self._closed:
            raise OSError("the fork server is closed")
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        read, write = os.pipe()
        try:
            socket.send_fds(self._connection, [message], [output, write])
        except ConnectionError:
            os.close(read)
            return 0
        finally:
            os.close(write)
        return int(await _read(read) or 0)

    async def _end(self) -> None:
        """Waits for the end of a server that does not answer: until then it cannot be told from one that runs."""
        for _ in range(_END_LOOKS):
            if self._process is None or self._process.poll() is not None:
                return
            await asyncio.sleep(_END_PAUSE)

    def close(self) -> None:
        """Ends the server; who waits for a fork gets an OSError. What it forked runs on."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                self._command,
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # who starts in the usual way instead says what is wrong
                env=self._env,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )


async def _read(descriptor: int) -> bytes:
    """What comes until the other end closes."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    )
    try:
        return await stream.read(_LONGEST_PID)
    finally:
        transport.close()
