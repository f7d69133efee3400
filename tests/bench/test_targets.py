"""Targets are real processes: they get ready, die, hang and refuse to end, and nothing of them stays behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench.compare import compare_targets
from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Run
from bench.measure.record import LagSamples, RunResult
from bench.measure.summary import summarise
from bench.targets import Started, Target, parse_target

# Answers as the words after the port say. Its own pid and a child's go into a file.
SERVER = """
import http.server, os, pathlib, signal, subprocess, sys, time

port, pids, *traits = sys.argv[1:]
healths = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global healths
        status, body = 200, b'{"data": [{"id": "m"}]}'
        if self.path == "/health":
            healths += 1
            status = 503 if "waits" in traits or ("late" in traits and healths < 3) else 200
            if "plain" in traits:
                status = 404
        elif "closed" in traits:
            status = 401
        elif "empty" in traits:
            body = b'{"data": []}'
        elif "odd" in traits:
            body = b"[]"
        elif self.path == "/die":
            print("out of memory", flush=True)
            os._exit(3)
        elif self.path == "/healths":
            body = str(healths).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

def end(*_):
    if "tidy" in traits:
        time.sleep(0.3)
        pathlib.Path(pids + ".tidied").touch()
    raise SystemExit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in traits else end)
found = [os.getpid()]
if "parent" in traits:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    found.append(child.pid)
with open(pids, "a") as file:
    file.write("".join(f"{pid}\\n" for pid in found))
if "dies" in traits:
    sys.exit("no such model")
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
server.serve_forever()
"""


class Lab:
    """A folder with the server's script, the pids of what ran, and the logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir()
        (folder / "server.py").write_text(SERVER)

    def command(self, *traits: str, name: str = "srv") -> Target:
        script, pids = self.folder / "server.py", self.folder / f"{name}.pids"
        return Target(name=name, command=(sys.executable, str(script), "{port}", str(pids), *traits))

    def pids(self, name: str = "srv") -> list[int]:
        path = self.folder / f"{name}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def running(self, name: str = "srv") -> list[int]:
        return [pid for pid in self.pids(name) if runs(pid)]

    async def started(self, number: int = 1) -> None:
        while len(self.pids()) < number:
            await asyncio.sleep(0.02)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(made.logs))
    return made


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def get(url: str, path: str) -> bytes:
    """Body of an answer; empty if the connection ends."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


# What a target is


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://h:1", Target(name="h:1", url="http://h:1")),
        (" https://h/v1/ ", Target(name="h/v1", url="https://h/v1/")),
        ("http://h/?a=b", Target(name="h/?a=b", url="http://h/?a=b")),
        ("ours=http://h:1", Target(name="ours", url="http://h:1")),
        ("env true --port={port}", Target(name="env", command=("env", "true", "--port={port}"))),
        ("/usr/bin/env a={port}", Target(name="env", command=("/usr/bin/env", "a={port}"))),
        ("v0.2=env 'a b' \"{port}\"", Target(name="v0.2", command=("env", "a b", "{port}"))),
    ],
)
def test_targets_are_read(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a URL nor"),
        ("127.0.0.1:8000", "neither a URL nor"),
        ("name=env serve", "neither a URL nor"),
        ("env 'serve {port}", "No closing quotation"),
        ("no-such-program-here {port}", "no program 'no-such-program-here'"),
    ],
)
def test_what_is_no_target_is_explained(text: str, reason: str) -> None:
    with pytest.raises(BenchError, match=re.escape(reason)) as error:
        parse_target(text)
    assert "tandem up --port {port}" in str(error.value)


# Starting and stopping


async def test_a_url_is_left_alone() -> None:
    async with Started(Target(name="far", url="http://192.0.2.1:9")) as url:
        assert url == "http://192.0.2.1:9"


@pytest.mark.parametrize("trait", ["healthy", "plain", "closed"])
async def test_a_command_serves_inside_and_is_gone_outside(lab: Lab, trait: str) -> None:
    async with Started(lab.command(trait)) as url:
        assert await get(url, "/v1/models")
        assert len(lab.running()) == 1
    assert len(lab.pids()) == 1 and not lab.running()
    assert not list(lab.logs.iterdir())
    with pytest.raises(ConnectionRefusedError):
        await get(url, "/v1/models")


async def test_it_waits_for_health(lab: Lab) -> None:
    async with Started(lab.command("late")) as url:
        assert int(await get(url, "/healths")) == 3


async def test_one_that_dies_shows_its_output(lab: Lab) -> None:
    with pytest.raises(BenchError, match=r"(?s)srv ended with status 1 before it was ready.*no such model") as error:
        async with Started(lab.command("dies", "parent"), kill_wait=0.3):
            pytest.fail("it never was ready")
    assert len(lab.pids()) == 2 and not lab.running()
    (log,) = lab.logs.iterdir()
    assert str(log) in str(error.value) and log.read_text() == "no such model\n"


async def test_one_that_was_killed_says_by_what(lab: Lab) -> None:
    async def kill() -> None:
        await lab.started()
        os.kill(lab.pids()[0], signal.SIGKILL)

    killing = asyncio.create_task(kill())
    with pytest.raises(BenchError, match="was ended by SIGKILL before"):
        async with Started(lab.command("waits")):
            pytest.fail("it never was ready")
    await killing


async def test_those_that_are_never_ready_are_given_up(lab: Lab) -> None:
    async def give_up(trait: str) -> str:
        with pytest.raises(BenchError) as error:
            async with Started(lab.command(trait, name=trait), ready_timeout=3):
                pytest.fail("it never was ready")
        assert lab.pids(trait) and not lab.running(trait)
        return str(error.value).splitlines()[0]

    waits, empty, odd = await asyncio.gather(give_up("waits"), give_up("empty"), give_up("odd"))
    assert waits.startswith("waits is not ready after 3 s: /health answers 503")
    assert empty.startswith("empty is not ready after 3 s: /v1/models lists no model")
    assert odd.startswith("odd is not ready after 3 s: /v1/models is no list of models")


async def test_one_that_does_not_listen_is_given_up(lab: Lab) -> None:
    silent = Target(name="silent", command=(sys.executable, "-c", "import time; time.sleep(60)", "{port}"))
    with pytest.raises(BenchError, match=r"silent is not ready after 0.3 s: it does not answer"):
        async with Started(silent, ready_timeout=0.3):
            pytest.fail("it never was ready")


async def test_what_cannot_be_started_says_why(lab: Lab) -> None:
    with pytest.raises(BenchError, match=r"gone: \./gone cannot be started: No such file"):
        async with Started(Target(name="gone", command=("./gone", "{port}"))):
            pytest.fail("it never ran")
    assert not list(lab.logs.iterdir())


async def test_it_has_time_to_end_in_order(lab: Lab) -> None:
    async with Started(lab.command("tidy")):
        pass
    assert (lab.folder / "srv.pids.tidied").exists()


async def test_one_that_ignores_sigterm_is_killed(lab: Lab) -> None:
    async with Started(lab.command("stubborn"), kill_wait=0.5):
        began = time.monotonic()
    assert time.monotonic() - began >= 0.5
    assert lab.pids() and not lab.running()


async def test_a_grandchild_that_ignores_sigterm_is_killed_with_it(lab: Lab) -> None:
    async with Started(lab.command("parent"), kill_wait=0.5):
        assert len(lab.running()) == 2
    assert not lab.running()


async def test_an_error_inside_passes_and_ends_it(lab: Lab) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Started(lab.command()):
            _ = 1 / 0
    assert lab.pids() and not lab.running() and not list(lab.logs.iterdir())


async def test_one_that_dies_inside_is_told(lab: Lab) -> None:
    with pytest.raises(BenchError, match=r"(?s)srv ended with status 3 while it was measured.*out of memory"):
        async with Started(lab.command()) as url:
            await get(url, "/die")
            await asyncio.sleep(0.1)
            raise BenchError("it does not answer")


async def test_cancelled_while_it_starts_nothing_stays(lab: Lab) -> None:
    async def use() -> None:
        async with Started(lab.command("waits", "parent"), kill_wait=0.3):
            pytest.fail("it never was ready")

    using = asyncio.create_task(use())
    await lab.started(2)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert not lab.running() and not list(lab.logs.iterdir())


async def test_cancelled_while_it_ends_it_is_killed_at_once(lab: Lab) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def use() -> None:
        async with Started(lab.command("stubborn"), kill_wait=60):
            inside.set()
            await leave.wait()

    using = asyncio.create_task(use())
    await inside.wait()
    leave.set()
    await asyncio.sleep(0.1)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(using, 30)
    assert lab.pids() and not lab.running()


async def test_stop_ends_the_wait_for_it(lab: Lab) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    with pytest.raises(BenchError, match="srv: interrupted before it was ready"):
        async with Started(lab.command("waits"), stop=stop):
            pytest.fail("it never was ready")
    assert not lab.running() and not list(lab.logs.iterdir())


def test_ctrl_c_leaves_nothing_behind(lab: Lab) -> None:
    code = f"""
import asyncio, signal
from bench.targets import Started, Target
signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs the tests may have switched off
async def main():
    async with Started(Target(name="srv", command={lab.command("parent").command!r}), kill_wait=0.5):
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tool:
        assert tool.stdout is not None and tool.stdout.readline() == b"ready\n"
        assert len(lab.running()) == 2
        tool.send_signal(signal.SIGINT)
        tool.wait(30)
    assert not lab.running()


# Compared


CONFIG = LoadConfig(url="unused")


@pytest.mark.parametrize("keep_running", [False, True])
async def test_compared_commands_run_for_their_turn_or_all_the_time(lab: Lab, keep_running: bool) -> None:
    at_once: list[tuple[int, int]] = []

    async def probe(config: LoadConfig, label: str) -> Run:
        name = label.partition(",")[0]
        assert await get(config.url, "/v1/models")
        at_once.append((len(lab.running("a")), len(lab.running("b"))))
        assert len(lab.running(name)) == 1
        return run_of(config, label)

    await compare_targets(CONFIG, [lab.command(name="a"), lab.command(name="b")], 2, keep_running, probe)
    assert at_once == ([(1, 1)] * 4 if keep_running else [(1, 0), (0, 1), (0, 1), (1, 0)])
    assert len(lab.pids("a")) == len(lab.pids("b")) == (1 if keep_running else 2)
    assert not lab.running("a") and not lab.running("b")


async def test_a_target_that_dies_later_costs_only_the_runs_to_come(lab: Lab) -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        if label == "b, round 2":
            await get(config.url, "/die")
            await asyncio.sleep(0.1)
        return run_of(config, label)

    experiment = await compare_targets(CONFIG, [lab.command(name="a"), lab.command(name="b")], 3, False, probe)
    assert [run.target for run in experiment.runs] == ["a", "b", "b"]
    assert "b ended with status 3 while it was measured" in experiment.stopped_because


async def test_ctrl_c_while_a_target_starts_keeps_what_there_is(lab: Lab) -> None:
    stop = asyncio.Event()

    async def probe(config: LoadConfig, label: str) -> Run:
        asyncio.get_running_loop().call_later(0.5, stop.set)
        return run_of(config, label)

    starting = [lab.command(name="a"), lab.command("waits", name="b")]
    experiment = await compare_targets(CONFIG, starting, 3, False, probe, stop)
    assert [run.target for run in experiment.runs] == ["a"] and experiment.stopped_because == "interrupted"
    assert not lab.running("a") and not lab.running("b")


async def test_a_target_that_never_ran_is_an_error(lab: Lab) -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        return run_of(config, label)

    with pytest.raises(BenchError, match="no such model"):
        await compare_targets(CONFIG, [lab.command(name="a"), lab.command("dies", name="b")], 3, False, probe)
    assert not lab.running("a")


def run_of(config: LoadConfig, label: str) -> Run:
    nothing = RunResult(started_at=0.0, wall_seconds=1.0, records=[], lag=LagSamples())
    return Run(label=label, config=config, result=nothing, summary=summarise(config, nothing))
