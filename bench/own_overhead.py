"""What the load generator itself costs: `python -m bench.own_overhead --streams 1000 --rate 20 --json F`.

A scripted server sends streams of known pace; `tandem bench run` keeps so many of them in flight with one load process.
Requests start evenly, so that as many begin as end. Reported for each number of streams: how late requests were sent
(send lag) and a timer of the loop fired (loop lag), and the CPU time of the load process. A ladder of numbers around
`--streams` is bisected for the highest one whose send lag p99 holds the bound.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.measure.summary_format import Summary
from bench.scripted_server import Script, ScriptedAnswer, start_server

BOUND_MS = 5.0  # of the send lag p99
STREAM_SECONDS = 8.0  # length of one answer
LADDER = tuple(step / 4 for step in range(1, 9))  # times --streams
_LOAD_PROCESS = b"bench.load.process"
_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE = 0.2  # seconds between two looks at the CPU time of a process


class CpuMeter:
    """CPU seconds of a process, read from /proc for as long as it lives."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self.total = self._read()

    def sample(self) -> None:
        """Reads again; keeps the last value of a process that has ended."""
        with contextlib.suppress(OSError):
            self.total = self._read()

    @property
    def used(self) -> float:
        """Since the meter was made."""
        return self.total - self._first

    def _read(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS  # user and system time


class MachineMeter(CpuMeter):
    """CPU seconds of all processes together."""

    def __init__(self) -> None:
        super().__init__(0)

    def _read(self) -> float:
        user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:11]
        return sum(map(int, (user, nice, system, irq, softirq))) / _TICKS


def find_load_process(parent: int) -> int | None:
    """The load process of a running `tandem bench`, once there is one."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if _LOAD_PROCESS in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def measure(streams: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run with so many streams in flight."""
    tokens = int(arguments.rate * STREAM_SECONDS)
    script = Script(answers=[ScriptedAnswer(ttft=1 / arguments.rate, gaps=(1 / arguments.rate,))])
    summary_path = folder / f"{streams}.json"
    with start_server(folder, script) as server:
        flags = {
            "url": server.url,
            "tokenizer": arguments.tokenizer,
            "arrival": "constant",
            "rate": streams / STREAM_SECONDS,
            "duration": STREAM_SECONDS + arguments.seconds,
            "warmup": streams,
            "input-len": 64,
            "output-len": tokens,
            "json": summary_path,
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        tandem = subprocess.Popen([sys.executable, "-m", "services.cli", "bench", "run", "--quiet", *given])
        while (pid := find_load_process(tandem.pid)) is None and tandem.poll() is None:
            time.sleep(_SAMPLE)
        if pid is None:
            raise RuntimeError(f"tandem bench run ended with status {tandem.returncode} before its load began")
        started = time.monotonic()
        loading, serving, coordinating = (CpuMeter(one) for one in (pid, server.process.pid, tandem.pid))
        machine = MachineMeter()
        while Path(f"/proc/{pid}").exists():
            time.sleep(_SAMPLE)
            for meter in (loading, serving, coordinating, machine):
                meter.sample()
        seconds = time.monotonic() - started
        if tandem.wait():
            raise RuntimeError(f"tandem bench run ended with status {tandem.returncode}")
        messages = sum(len(sent.times) for sent in server.log())
    summary = msgspec.json.decode(summary_path.read_bytes(), type=Summary)
    lag = summary.send_lag_ms.p99
    assert lag is not None and summary.itl_ms.p50 is not None
    paced = summary.itl_ms.p50 < 1.1 * 1e3 / arguments.rate  # otherwise the server was the bottleneck
    return {
        "streams": streams,
        "messages": messages,
        "measured_tokens_per_s": summary.throughput.output_tokens_per_s,
        "send_lag_p99_ms": lag,
        "loop_lag_p99_ms": summary.loop_lag_ms.p99,
        "itl_p50_ms": summary.itl_ms.p50,
        "itl_p99_ms": summary.itl_ms.p99,
        "load_process_cpu_s_per_1000_messages": 1000 * loading.total / messages,
        "cores": {
            "load_process": loading.used / seconds,
            "coordinator": coordinating.used / seconds,
            "server": serving.used / seconds,
            "others": max(0.0, machine.used - loading.used - coordinating.used - serving.used) / seconds,
        },
        "errors": summary.errors,
        "holds": lag < BOUND_MS and paced and not summary.errors,
    }


def try_to_hold(streams: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs until one holds: other things on the machine only ever add lag."""
    runs: list[dict[str, Any]] = []
    while len(runs) < arguments.tries and not (runs and runs[-1]["holds"]):
        run = measure(streams, arguments, folder)
        runs.append(run)
        print(
            f"{streams} streams: send lag p99 {run['send_lag_p99_ms']:.2f} ms, loop lag p99 "
            f"{run['loop_lag_p99_ms']:.2f} ms, {1e3 * run['load_process_cpu_s_per_1000_messages']:.1f} ms CPU per "
            f"1,000 messages, {run['cores']['others']:.2f} cores busy with other things: "
            f"{'holds' if run['holds'] else 'fails'}",
            flush=True,
        )
    return runs


def find_highest(arguments: argparse.Namespace, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """(most streams that hold, 0 for none; all runs). Begins with --streams itself."""
    ladder = [max(1, round(arguments.streams * step)) for step in LADDER]
    runs: list[dict[str, Any]] = []
    holds, fails = -1, len(ladder)  # places in the ladder
    place = LADDER.index(1.0)
    while fails - holds > 1:
        runs += try_to_hold(ladder[place], arguments, folder)
        holds, fails = (place, fails) if runs[-1]["holds"] else (holds, place)
        place = (holds + fails) // 2
    return (ladder[holds] if holds >= 0 else 0), runs


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="in flight at once")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="time with all streams in flight")
    parser.add_argument("--tries", type=int, default=3, help="runs of a number of streams until one holds")
    parser.add_argument("--tokenizer", default="SmolLM2-135M-Instruct", help="prompts are made of its tokens")
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        highest, runs = find_highest(arguments, Path(folder))
    report = {
        "rate": arguments.rate,
        "seconds": arguments.seconds,
        "cores_of_machine": os.cpu_count(),
        "bound_send_lag_p99_ms": BOUND_MS,
        "highest_streams": highest,
        "runs": sorted(runs, key=lambda run: int(run["streams"])),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
