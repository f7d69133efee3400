"""How soon a cluster of `tandem up` is ready, and how soon it answers again after a process of it was killed.

    python -m bench.start --rounds 3 --json found.json -- --model smollm2 --prefill 1 --decode 1

What follows `--` are options of `tandem up`. In each round a cluster starts; then its processes of the roles in
`--kill` are killed, one role after the other, all of a role at once, and a request is sent again and again until it is
answered. Told are seconds, CPU seconds of all processes of the round's start, and the memory that each process has
alone, with its part of what several share (PSS). To compare two versions, run each from its own checkout, in turn.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.provenance import report

_PAUSE = 0.05  # seconds between two requests to a cluster that does not answer
_MOST = 300.0  # seconds that a start, or an answer, may take
_PROMPT = "The capital of France is"


def _ticks(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[int]:
    """A process and all that it, and they, have started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _family(int(child))
    return found


def _pss(pid: int) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _answers(url: str, model: str) -> bool:
    """Whether a short request is answered."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 2}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def one_round(options: Sequence[str], kill: Sequence[str], log: Path) -> dict[str, Any]:
    """What one cluster showed. Raises RuntimeError if it does not come up, or answer."""
    began = time.monotonic()
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", "0", "--admin-port", "0", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    pids: dict[str, int] = {}
    try:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] in ("started", "restarted"):
                pids[event["name"]] = event["pid"]
            elif event["event"] == "ready":
                break
        else:
            raise RuntimeError(f"the cluster did not start; see {log}")
        found: dict[str, Any] = {"ready_seconds": time.monotonic() - began}
        family = _family(process.pid)
        found["cpu_seconds"] = sum(_ticks(pid) for pid in family)
        found["pss_bytes"] = sum(_pss(pid) for pid in family)
        _wait(event)
        for role in kill:
            victims = [pid for name, pid in pids.items() if name.partition("-")[0] == role]
            if not victims:
                raise RuntimeError(f"the cluster has no {role}")
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            _wait(event)
            found[f"{role}_seconds"] = time.monotonic() - killed
        return found
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _wait(ready: dict[str, Any]) -> None:
    """Until the cluster answers."""
    ends = time.monotonic() + _MOST
    while not _answers(ready["url"], ready["model"]):
        if time.monotonic() > ends:
            raise RuntimeError(f"no answer within {_MOST:.0f} s")
        time.sleep(_PAUSE)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Clusters that are started, one after the other.")
    parser.add_argument("--kill", default="decode,router,gateway", help="Roles whose processes are killed, in turn.")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="File for the last cluster's log.")
    parser.add_argument("--json", type=Path, help="File for the result.")
    parser.add_argument("options", nargs="*", help="Of `tandem up`, after --.")
    arguments = parser.parse_args()
    kill = [role for role in arguments.kill.split(",") if role]
    try:
        rounds = [
            one_round(arguments.options, kill, arguments.log)
            for _ in track(range(arguments.rounds), "clusters", console=Console(stderr=True))
        ]
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    table = Table("", "median", "each")
    for name in rounds[0]:
        each = [found[name] / (1 << 20 if name.endswith("bytes") else 1) for found in rounds]
        label = name.replace("_bytes", ", MiB").replace("_seconds", ", s")
        table.add_row(label, f"{statistics.median(each):,.2f}", " ".join(f"{value:,.2f}" for value in each))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(report("bench.start", {"rounds": rounds}))


if __name__ == "__main__":
    main()
