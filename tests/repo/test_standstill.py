"""Tests that fail while the machine stands still, or is late, are run again; no other failure is."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import time

tried = []

def fails_first(tmp_path_factory, said):
    tried.append(said)
    (tmp_path_factory.mktemp("cluster") / "up.log").write_text(said)
    assert tried.count(said) > 1, "the first time"

def test_stood_still(tmp_path_factory):
    fails_first(tmp_path_factory, "gateway | this process stood still for longer than its lease seconds=2.3")

def test_is_late():
    tried.append("late")
    deadline = time.monotonic() + tried.count("late") - 1.5
    assert time.monotonic() < deadline, "nothing has come"

def test_is_wrong(tmp_path_factory):
    fails_first(tmp_path_factory, "gateway | all is well")
"""


def test_only_what_stood_still_or_was_late_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (again,) = re.findall(r"^AGAIN := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'tmp'}"]
    command = [sys.executable, "-m", "pytest", "test_it.py", *options, *again.replace("'", "").split()]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(ROOT / "tests")}
    )
    assert "1 failed, 2 passed, 2 rerun" in done.stdout, done.stdout + done.stderr
    assert all(told in done.stdout for told in ("seconds=2.3", "nothing has come", "the first time"))
