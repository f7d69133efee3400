"""What a supervisor of real children tells, and what became of their processes."""

import asyncio
from pathlib import Path
from typing import Any


class Recorder:
    """Events and lines in their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[tuple[str, str]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def line(self, child: str, text: str) -> None:
        self.lines.append((child, text))


def state(pid: int) -> str:
    """Of a process, "Z" for a zombie; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether there is such a process and it is no zombie."""
    return state(pid) not in ("", "Z")


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
