"""Pages on running a cluster: their commands are run as they stand there, and what they name is in the code.

A block of `bash` is run; one of `sh` is not, and the text before it says so by a star.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

from services.config import GatewayConfig, KvConfig, RouterConfig, WorkerConfig, load

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("operations", "troubleshooting", "tuning", "deploy")}
COMMANDS = {
    f"{name}-{number}": block
    for name, text in PAGES.items()
    for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
}
MODEL = "SmolLM2-135M-Instruct"  # in commands
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pages")
    options = ["--decode", "2", "--dummy-seed", "3", "--threads", "1", "--kv-memory", "64MiB"]
    options += ["--local-prefill-tokens", "0"]
    running = start_cluster(folder, *options, model=str(tiny_model(folder / "tiny")))
    try:
        yield running
    finally:
        stop_cluster(running)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """With the addresses of the cluster that runs here; other clusters of the same user may run beside it."""
    tandem = tmp_path / "tandem"
    tandem.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    tandem.chmod(0o755)
    command = (
        COMMANDS[name].replace("http://127.0.0.1:8000", cluster.url).replace("http://127.0.0.1:8090", cluster.admin)
    )
    command = command.replace(MODEL, cluster.model)
    command = command.replace("tandem bench run", f"tandem bench run --tokenizer {cluster.log.parent / 'tiny'}")
    of_this_one = r"^tandem (top|sleep|wake|router \w+|kv trace)\b(.*)$"
    command = re.sub(of_this_one, rf"tandem \1\2 --url {cluster.url}", command, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and '"error"' not in done.stdout


def test_what_is_not_run_says_so() -> None:
    for name in ("operations", "troubleshooting", "tuning"):
        before = re.findall(r"([^\n]*)\n\n```sh\n", PAGES[name])
        assert all(line.endswith("*:") for line in before), (name, before)
        assert set(re.findall(r"^```(\w+)", PAGES[name], re.MULTILINE)) <= {"bash", "sh"}


def test_each_alert_has_its_line() -> None:
    assert re.findall(r"^\| `(Tandem\w+)` \|", PAGES["operations"], re.MULTILINE) == ALERTS


def test_messages_are_those_of_the_code() -> None:
    folders = ("services", "engine", "kv_transfer", "router")
    code = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings over several lines
    cells = re.findall(r"^\| ([^|]*) \|", PAGES["troubleshooting"], re.MULTILINE)
    # Names of stages and settings are short; what has spaces is a message.
    messages = [message for cell in cells for message in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(messages) > 25
    parts = [part for message in messages for part in message.split("...") if part.strip()]
    assert [part for part in parts if part.strip() not in code] == []


def test_settings_that_are_named_exist() -> None:
    known = {
        f.name for kind in (GatewayConfig, RouterConfig, WorkerConfig, KvConfig) for f in msgspec.structs.fields(kind)
    }
    (table,) = re.findall(r"## Knobs\n(.*?)\n\nWhich connector", PAGES["tuning"], re.DOTALL)
    named = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)?", table, re.MULTILINE)
    assert len(named) > 10 and {name for row in named for name in row if name} <= known


def test_the_files_of_a_cluster_of_units_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables in docs/deploy.md are settings, with values that the processes take."""
    shared, *own = re.findall(r"^```ini\n(.*?)^```$", PAGES["deploy"], re.MULTILINE | re.DOTALL)
    kinds = {"router": RouterConfig, "gateway": GatewayConfig, "prefill": WorkerConfig}
    roles = []
    for text in own:
        told = dict(line.split("=", 1) for line in (shared + text).splitlines())
        role = told.pop("ROLE")
        roles.append(role)
        with monkeypatch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, value)
            config = load(kinds[role], {})
        known = {f"TANDEM_{field.name.upper()}" for kind in kinds.values() for field in msgspec.structs.fields(kind)}
        assert told.keys() <= known
        assert config.state == told["TANDEM_STATE"] and config.bind == told["TANDEM_BIND"]
    assert roles == list(kinds)


def test_the_unit_starts_what_exists() -> None:
    unit = (ROOT / "deploy/systemd/tandem@.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert settings["ExecStart"] == "/opt/tandem/bin/tandem serve ${ROLE}"
    told = dict(pair.split("=") for pair in settings["Environment"].split())
    assert float(told["TANDEM_DRAIN_SECONDS"]) + 10 <= float(settings["TimeoutStopSec"])
    assert settings["RestartPreventExitStatus"] == "78"
