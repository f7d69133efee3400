"""The sending process of `tandem kv bench`, as the measuring one sees it."""

import os
import select
import subprocess
import sys

import msgspec

from kv_transfer.bench.messages import Answer, Command
from kv_transfer.connectors.base import ConnectorError

STUCK_SECONDS = 120.0  # the first command waits for torch, a device and kernels that are compiled


class Child:
    """The sending process. One command at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kv_transfer.bench.sender"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def tell(self, command: Command) -> None:
        """Gives a command; `hear` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def has_answered(self, patience: float = 0.0) -> bool:
        """Whether `hear` would return at once, or so within so many seconds."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], patience)[0])

    def hear(self) -> Answer:
        """The answer to the command. Raises ConnectorError if it failed."""
        assert self._process.stdout is not None
        if not self.has_answered(STUCK_SECONDS):
            raise ConnectorError(f"the sending process of the benchmark has not answered in {STUCK_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ConnectorError("the sending process of the benchmark has died; its last words are above")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise ConnectorError(answer.error)
        return answer

    def ask(self, command: Command) -> Answer:
        """Gives a command and waits for its end."""
        self.tell(command)
        return self.hear()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
