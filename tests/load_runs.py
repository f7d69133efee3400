"""Runs `tandem bench run` as users do and reads what it leaves behind."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.measure.record import Record
from bench.measure.record_files import read_records
from bench.measure.summary_format import Summary
from engine.weights.resolve import resolve


@dataclass
class LoadRun:
    """A run that has ended."""

    summary: Summary
    records: list[Record]
    shown: str  # on the terminal


class RunningLoad:
    """A run under way. Flags are named as on the command line, with _ for -."""

    def __init__(self, url: str, folder: Path, **flags: Any) -> None:
        self._summary = folder / "summary.json"
        self._records = folder / "records.jsonl"
        small = {"input_len": 8, "output_len": 8, "tokenizer": resolve()}
        given = small | flags | {"url": url, "json": self._summary, "records": self._records}
        parts: list[str] = []
        for name, value in given.items():
            parts += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "bench", "run", "--quiet", *parts],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, status: int) -> str:
        """What it has shown when it ends with this exit status."""
        shown, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == status, shown
        return shown

    def wait(self) -> LoadRun:
        """What it has found when it ends well."""
        shown = self.end(0)
        summary = msgspec.json.decode(self._summary.read_bytes(), type=Summary)
        return LoadRun(summary, read_records(self._records), shown)


def load_run(url: str, folder: Path, **flags: Any) -> LoadRun:
    """A whole run."""
    return RunningLoad(url, folder, **flags).wait()
