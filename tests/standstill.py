"""Whether processes got no processor for so long that a test that fails says nothing of Tandem."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LONG = 0.5  # seconds
_NAP = 0.02
_SAID = "this process stood still for longer than its lease"  # services/cluster_state.py


class StoodStill(Exception):
    """A test failed while a process stood still. It is run again, as after `faults_hit.FaultMissed` (Makefile)."""


class Witness:
    """Sleeps briefly again and again, and knows for how long it did so at most."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._watch, daemon=True, name="witness").start()

    def _watch(self) -> None:
        while True:
            begun = time.monotonic()
            time.sleep(_NAP)
            self.longest = max(self.longest, time.monotonic() - begun)


@contextmanager
def judged(witness: Witness, folder: Path) -> Iterator[None]:
    """Raises StoodStill for what fails while `witness` stood still, or a process whose log is in `folder` did."""
    witness.longest = 0.0
    sizes = {log: log.stat().st_size for log in _logs(folder)}
    try:
        yield
    except (Exception, pytest.fail.Exception) as failure:
        said = [line for log in _logs(folder) for line in _added(log, sizes.get(log, 0)) if _SAID in line]
        if witness.longest > LONG:
            said.append(f"the tests' own process stood still for {witness.longest:.1f} s")
        if said:
            raise StoodStill("\n".join([str(failure), *said])) from failure
        raise


def _logs(folder: Path) -> list[Path]:
    found = (*folder.glob("*/up.log"), *folder.glob("*/*/up.log"))
    return sorted({log.resolve() for log in found})  # pytest links the latest folder of each name, too


def _added(log: Path, size: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace").splitlines()
