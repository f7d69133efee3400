"""The README's commands, run as they stand there; only the ports are others, so that nothing on the machine collides.

Blocks that start a cluster (`make up`, `tandem up`) run until they say that it is ready, and are ended by Ctrl-C.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [text for language, text in BLOCKS if language == "bash"]
PYTHON = [text for language, text in BLOCKS if language == "python"]
MAKE_UP = [text for text in SHELL if text.startswith("make up")]
TANDEM_UP = [text for text in SHELL if text.startswith(".venv/bin/tandem up")]
COMMANDS = [text for text in SHELL if text not in MAKE_UP + TANDEM_UP]

pytestmark = pytest.mark.timeout(600)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: str, log: Path) -> Iterator[str]:
    """Yields the URL once the cluster is ready; afterwards it must end by SIGINT within 12 s."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        output = ""
        deadline = time.monotonic() + 200
        while (found := re.search(r"^ready (\S+)\n", output, re.MULTILINE)) is None:
            if select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                data = os.read(process.stdout.fileno(), 65536)
                output += data.decode()
                if data:
                    continue
            pytest.fail(f"{command!r} is not ready:\n{output}\n{log.read_text()[-4000:]}")
        yield found.group(1)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=12)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
        process.stdout.close()


ADMIN_PORT = free_port()


@pytest.fixture(scope="class")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """HTTP port of the cluster that `make up` starts."""
    port = free_port()
    (command,) = MAKE_UP
    with running(
        f'{command.strip()} ARGS="--port {port} --admin-port {ADMIN_PORT}"', tmp_path_factory.mktemp("readme") / "log"
    ) as url:
        assert url == f"http://127.0.0.1:{port}"
        yield port


class TestCluster:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_command(self, port: int, command: str) -> None:
        command = command.replace("8000", str(port)).replace("8001", str(free_port())).replace("8090", str(ADMIN_PORT))
        command = command.replace("tandem chat", f"tandem chat --url http://127.0.0.1:{port}")
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip() and '"error"' not in done.stdout
        if '"stream": true' in command:
            assert_streamed(done.stdout)

    @pytest.mark.parametrize("program", PYTHON)
    def test_program(self, port: int, program: str) -> None:
        python = ROOT / ".venv/bin/python"
        done = subprocess.run([python, "-c", program.replace("8000", str(port))], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout

    def test_the_cache_has_moved(self, port: int) -> None:
        """After all of the above, the metrics tell of bytes."""
        (command,) = [text for text in COMMANDS if "/metrics" in text]
        shown = subprocess.run(
            command.replace("8090", str(ADMIN_PORT)), shell=True, capture_output=True, text=True
        ).stdout
        assert any(float(line.split()[-1]) > 0 for line in shown.splitlines() if not line.startswith("#")), shown


def assert_streamed(output: str) -> None:
    events = [line.removeprefix("data: ") for line in output.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("command", TANDEM_UP)
def test_other_clusters_start(command: str, tmp_path: Path) -> None:
    with running(f"exec {command.strip()}".replace("8001", str(free_port())), tmp_path / "log"):
        pass


def test_every_block_was_run() -> None:
    assert len(MAKE_UP) == 1 and len(TANDEM_UP) >= 2 and len(COMMANDS) >= 4 and len(PYTHON) >= 1
    assert README.count("```") == 2 * (len(BLOCKS) + README.count("```mermaid"))
