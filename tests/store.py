"""A Redis server for tests, which is emptied, stopped and started again at its port."""

import signal
import socket
import subprocess
import tempfile
import time

import redis

from services.embedded_state import find_server


class Store:
    """A server at one port, without a password, that comes back empty."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = [find_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen([*command, "--dir", tempfile.gettempdir()], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It answers nothing; connections to it are still taken."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
