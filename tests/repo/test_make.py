"""`make test` with programs that only note that they ran: what fails ends it, and what it sets reaches them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """#!/bin/bash
echo "${0##*/} $*" >> "$LOG"
echo "bytecode ${PYTHONDONTWRITEBYTECODE-is written}" >> "$LOG"
[ "${0##*/}" != "$FAILS" ]
"""
ONCE = """
def test_number(seen=[]):
    seen.append(1)
    assert len(seen) > 1
def test_tokens(seen=[]):
    seen.append(1)
    assert seen == [1, 1]
def test_statuses(seen=[]):
    seen.append(200 if seen else 503)
    assert {seen[-1]} == {200}
"""


def make(tmp_path: Path, *arguments: str, fails: str = "") -> tuple[int, str, list[str]]:
    """(exit status, what was printed, lines of all programs in their order)."""
    venv, log = tmp_path / "venv", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    for name in ("chromium", "lint-imports", "mypy", "pip", "pytest", "python", "ruff"):
        (venv / "bin" / name).write_text(PROGRAM)
        (venv / "bin" / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"LOG": str(log), "FAILS": fails, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = f"{venv / 'bin'}:{environment['PATH']}"
    command = ["make", f"VENV={venv}"]
    stamp = subprocess.run(
        [*command, "--eval=stamp:;@echo $(STAMP)", "stamp"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    Path(stamp).touch()
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_all_is_checked_and_bytecode_is_written(tmp_path: Path) -> None:
    status, printed, ran = make(tmp_path, "test")
    assert status == 0, printed
    pytests = [line for line in ran if line.startswith("pytest ")]
    assert [pytests[0].split()[1], *pytests[1].split()[1:3]] == [
        "--ignore=tests/cluster",
        "tests/repo",
        "tests/cluster",
    ]
    checks = ["ruff check .", "ruff format --check .", "mypy ", "lint-imports "]
    assert set(checks) <= set(ran[: ran.index(pytests[0])])
    assert {line for line in ran if line.startswith("bytecode ")} == {"bytecode is written"}


@pytest.mark.parametrize("fails", ["ruff", "mypy", "lint-imports"])
def test_what_lint_finds_ends_it(tmp_path: Path, fails: str) -> None:
    status, _, ran = make(tmp_path, "test", fails=fails)
    assert status != 0 and not [line for line in ran if line.startswith("pytest ")]


def test_packages_that_cannot_be_had_are_told_of(tmp_path: Path) -> None:
    status, printed, ran = make(tmp_path, "packages", fails="pip")
    assert status == 0 and len([line for line in ran if line.startswith("pip ")]) == 4
    for extra in ("nixl", "ray", "k8s-dev"):
        assert f"== no {extra} here: its tests are skipped" in printed


def test_a_number_is_read_again_and_no_other_answer(tmp_path: Path) -> None:
    """Each fails once, beneath the options that `make test` gives pytest for clusters."""
    _, _, ran = make(tmp_path, "test")
    (options,) = [line.split()[3:] for line in ran if line.startswith("pytest tests/repo tests/cluster")]
    (tmp_path / "test_once.py").write_text(ONCE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_once.py", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ends = {name: end for end, name in re.findall(r"^(PASSED|FAILED) test_once.py::test_(\w+)", done.stdout, re.M)}
    assert ends == {"number": "PASSED", "tokens": "FAILED", "statuses": "FAILED"}, done.stdout + done.stderr
