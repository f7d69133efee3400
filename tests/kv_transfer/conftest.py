"""A peer in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("peer.py")


class Peer:
    """`peer.py` in a process that is started when first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "PYTHONPATH": str(PEER.parents[2]), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(PEER)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        return self._process

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command)
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.kill()
