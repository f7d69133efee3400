"""What results under bench/results say of where they come from: the command, the code and the processor."""

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def report(module: str, found: dict[str, Any]) -> str:
    """A file of JSON for what `python -m MODULE`, with the flags of this process, has found."""
    return (
        json.dumps({"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), **_machine(), **found}, indent=1)
        + "\n"
    )


def _machine() -> dict[str, Any]:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {"cpu": names[0], "cores": len(names), "python": platform.python_version(), "commit": commit.stdout.strip()}
