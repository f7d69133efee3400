"""Runs the server as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.scripted_server.script import Script, Sent

_GIVE_UP = 10.0  # seconds for the process to end


@dataclass
class ScriptedServer:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> list[Sent]:
        """What was sent in all answers that have ended, in order of arrival."""
        lines = self.log_path.read_bytes().splitlines() if self.log_path.exists() else []
        return sorted((msgspec.json.decode(line, type=Sent) for line in lines), key=lambda sent: sent.number)

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def start_server(folder: Path, script: Script, port: int = 0) -> Iterator[ScriptedServer]:
    """A server that listens. Script and log are files in `folder`."""
    script_path, log_path = folder / "script.json", folder / "sent.jsonl"
    script_path.write_bytes(msgspec.json.encode(script))
    command = [sys.executable, "-m", "bench.scripted_server", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--script", str(script_path), "--log", str(log_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the scripted server ended with status {process.wait(_GIVE_UP)}")
        yield ScriptedServer(process, int(line), log_path)
    finally:
        process.terminate()
        process.wait(_GIVE_UP)
        process.stdout.close()
