"""The `tandem` command as a user runs it: messages, exit statuses, what is left behind."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from cluster.tiny import tiny_model
from supervised import runs
from typer.testing import CliRunner

from services import logs
from services.cli import app
from services.config import ConfigError, KvConfig, disk_tier, load, parse_bytes
from services.embedded_state import StateServerError, find_server
from services.parts import ModelFlag, Part, UpOptions, named, parts_of, share_of_tiers
from services.prepare import StartFailed
from services.supervisor import EXIT_CONFIGURATION, Child
from services.up import _Children, _settings, _tell_models
from services.worker.devices import take_devices

TANDEM = [sys.executable, "-m", "services.cli"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "router"], "TANDEM_STATE"),
        (["serve", "gateway", "--state", "redis://127.0.0.1:1"], "TANDEM_MODEL"),
        (["serve", "router", "--state", "nonsense"], "redis://"),
        (["serve", "router", "--colour=red"], "no setting 'colour' (--colour)"),
        (["serve", "router", "--state"], "--state has no value"),
        (["serve", "router", "red"], "'red' is not a flag"),
        (["serve", "router", "--cluster-key", "k" * 32], "TANDEM_CLUSTER_KEY instead"),
        (["up", "--decode", "0"], "nobody would decode"),
        (["up", "--prefill", "-1"], "negative"),
        (["up", "--policy", "best"], "allowed: prefix"),
        (["up", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["chat", "--url", "ftp://x"], "address of a server"),
        (["chat", "--url", "http://127.0.0.1:1"], "is `tandem up` running?"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == EXIT_CONFIGURATION
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "serve"])
def test_help_gives_examples(command: str) -> None:
    assert f"tandem {command} " in CliRunner().invoke(app, [command, "--help"]).stdout


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([*TANDEM, "up", "--json", "--port", str(port)], capture_output=True, text=True)
    assert done.returncode == EXIT_CONFIGURATION
    assert f"port {port}" in done.stderr and "--port" in done.stderr
    assert done.stdout == ""  # no event


def test_up_obeys_flags_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('port = 9001\nthreads = 3\ncluster = "mine"\nmodel = "filed"\n')
    monkeypatch.setenv("TANDEM_THREADS", "4")
    monkeypatch.setenv("TANDEM_STATE", "redis://127.0.0.1:6390")
    settings = _settings(UpOptions(config=file, flags={"model": "flagged"}), [Part("prefill"), Part("decode")])
    assert settings["port"] == 9001 and settings["threads"] == 4 and settings["cluster"] == "mine"
    assert settings["model"] == "flagged" and settings["state"] == "redis://127.0.0.1:6390"
    monkeypatch.delenv("TANDEM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert 1 <= _settings(UpOptions(), [Part("decode")])["threads"] <= cores
    assert _settings(UpOptions(), [Part("decode")] * 10 * cores)["threads"] == 1


def _made(parts: list[Part], environment: dict[str, str]) -> list[Child]:
    living: list[Child] = []
    make = _Children(environment, living, {})
    for name, part in named(parts):
        living.append(make.child(name, part))
    return living


def test_settings_of_one_role() -> None:
    options = UpOptions(flags={"block_size": 8}, role_settings={"decode": ["block_size=32", "kv-dtype=fp8"]})
    parts = parts_of(options, [ModelFlag("")])
    assert _settings(options, parts)["block_size"] == 8
    environments = {child.name: child.env for child in _made(parts, {"X": "1"})}
    assert environments["decode-0"] == {
        "X": "1", "TANDEM_NAME": "decode-0", "TANDEM_FIRST_DEVICE": "1",
        "TANDEM_BLOCK_SIZE": "32", "TANDEM_KV_DTYPE": "fp8",
    }  # fmt: skip
    assert environments["prefill-0"] == {"X": "1", "TANDEM_NAME": "prefill-0", "TANDEM_FIRST_DEVICE": "0"}


def test_workers_have_devices_of_their_own() -> None:
    options = UpOptions(prefill=2, decode=2, role_settings={"prefill": ["tensor_parallel=2"]})
    children = _made(parts_of(options, [ModelFlag("")])[1:], {})
    firsts = {child.name: child.env.get("TANDEM_FIRST_DEVICE") for child in children}
    assert firsts == {"gateway": None, "prefill-0": "0", "prefill-1": "2", "decode-0": "4", "decode-1": "5"}


@pytest.mark.parametrize(
    ("gone", "ranks", "first"), [("decode-1", 1, "3"), ("decode-0", 1, "2"), ("decode-0", 2, "4"), (None, 1, "4")]
)
def test_a_later_worker_has_the_first_devices_that_nobody_has(gone: str | None, ranks: int, first: str) -> None:
    living = _made(parts_of(UpOptions(prefill=2, decode=2), [ModelFlag("")]), {})
    living = [child for child in living if child.name != gone]
    later = _Children({}, living, {}).child("decode-2", Part("decode", {"tensor_parallel": ranks}))
    assert later.env["TANDEM_FIRST_DEVICE"] == first


@pytest.mark.parametrize(
    ("visible", "first", "count", "taken"),
    [
        ("0,1,2,3", 2, 1, "2"),
        ("4,6", 1, 2, "6,4"),
        ("4,6", 5, 1, "6"),
        ("GPU-a,GPU-b", 3, 1, "GPU-b"),
        ("7", 2, 2, "7"),
    ],
)
def test_devices_are_counted_round(
    visible: str, first: int, count: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_devices(first, count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_size", "write NAME=VALUE"),
        ("blocks=3", "write NAME=VALUE with a setting of workers"),
        ("model=other", "model is not set for some workers alone"),
        ("cluster=other", "cluster is not set for some workers alone"),
        ("block_size=0", "0 is less than 1"),
        ("kv_dtype=fp7", "allowed: auto, fp8"),
    ],
)
def test_wrong_settings_of_one_role(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options = UpOptions(role_settings={"prefill": [text]})
        _settings(options, parts_of(options, [ModelFlag("")]))


def test_several_models(tmp_path: Path) -> None:
    texts = ["a=./x=1,block_size=32", "./b,prefill=0,decode=2,tensor-parallel=2", "c=smollm2,aggregated=1"]
    models = [ModelFlag.parse(text) for text in texts]
    assert [(model.name, model.model) for model in models] == [("a", "./x=1"), ("", "./b"), ("c", "smollm2")]
    options = UpOptions(prefill=2, role_settings={"decode": ["block_size=64", "max_running=8"]}, flags={"threads": 3})
    parts = parts_of(options, models)
    settings = _settings(options, parts)
    folders = {"a": Path("/x=1"), "b": Path("/of b"), "c": Path("/c")}
    _tell_models(folders, settings, parts)
    assert settings["model"] == Path("/x=1") and settings["model_name"] == "a"
    assert settings["more_models"] == "b=/of b,c=/c"
    children = {child.name: child.env for child in _made(parts, {})}
    assert list(children) == [
        "router",
        "gateway",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
        "aggregated-0",
    ]
    told = {name: (env.get("TANDEM_MODEL_NAME"), env.get("TANDEM_BLOCK_SIZE")) for name, env in children.items()}
    assert told["prefill-0"] == told["decode-0"] == ("a", "32")  # the model's own setting wins over the role's
    assert told["decode-1"] == told["decode-2"] == ("b", "64") and told["aggregated-0"] == ("c", None)
    assert [children[f"decode-{number}"]["TANDEM_FIRST_DEVICE"] for number in range(3)] == ["2", "3", "5"]
    assert children["decode-2"]["TANDEM_MAX_RUNNING"] == "8" and children["aggregated-0"]["TANDEM_MODEL"] == "/c"
    with pytest.raises(StartFailed, match="no comma"):
        _tell_models({"a": Path("/a"), "b": Path("/b,c")}, {}, [])


def test_a_path_that_is_there_is_a_model_whatever_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "odd=name,decode=2"
    folder.mkdir()
    assert ModelFlag.parse(str(folder)) == ModelFlag(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write MODEL or NAME=MODEL"),
        ("=./x", "write MODEL or NAME=MODEL"),
        ("a=", "write MODEL or NAME=MODEL"),
        ("a=./x,decode=-1", "does not count workers"),
        ("a=./x,decode", "does not count workers"),
        ("a=./x,port=3", "write NAME=VALUE with a setting of workers"),
        ("a=./x,model_name=b", "model_name is not set for some workers alone"),
        ("a=./x,decode=0", "nobody would decode for a"),
    ],
)
def test_wrong_models(text: str, message: str) -> None:
    with pytest.raises((ConfigError, StartFailed), match=message):
        parts_of(UpOptions(), [ModelFlag.parse(text)])


def test_a_server_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_server() != str(old)
    monkeypatch.setenv("TANDEM_REDIS_SERVER", str(old))
    with pytest.raises(StateServerError, match="version 6"):
        find_server()


def test_nothing_is_left_of_a_killed_up(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    arguments = ["--json", "--port", "0", "--model", str(model), "--dummy-seed", "1", "--kv-memory", "16MiB"]
    process = subprocess.Popen(
        [*TANDEM, "up", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    events = [json.loads(process.stdout.readline())]
    while events[-1]["event"] != "ready":
        events.append(json.loads(process.stdout.readline()))
    children = _children(process.pid)
    assert set(events[-1]["pids"].values()) < children  # and the cluster state
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in children]
    segments = set(re.findall(r"/dev/shm/(tandem-kv-\w+)", " ".join(maps)))  # other clusters may run beside it
    assert segments
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while left := [pid for pid in children if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert segments.isdisjoint(os.listdir("/dev/shm"))


def _children(parent: int) -> set[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture
def restored_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.basicConfig(level="WARNING", force=True)


@pytest.mark.parametrize("style", ["console", "json"])
@pytest.mark.parametrize(("level", "spoken"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_all_loggers_obey_the_level(
    level: str, spoken: int, style: str, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    logs.configure(level, style)
    log = structlog.get_logger()
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("ours")
        getattr(logging.getLogger("some.library"), name)("theirs")
        getattr(logging.getLogger("uvicorn.error"), name)("uvicorn")
    lines = capsys.readouterr().err.splitlines()
    assert sum("ours" in line for line in lines) == spoken
    assert sum("theirs" in line for line in lines) == spoken
    assert sum("uvicorn" in line for line in lines) == (4 if level == "debug" else min(2, spoken))


def test_json_lines_hold_exceptions(capsys: pytest.CaptureFixture[str], restored_logging: None) -> None:
    logs.configure("info", "json")
    secret = "text of a prompt"  # in the frame
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        structlog.get_logger().exception("ours")
        logging.getLogger("library").exception("theirs")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["ours", "theirs"]
    assert all("RuntimeError: broken" in json.loads(line)["exception"] for line in lines)
    assert not any(secret in line for line in lines)  # no variables of the frames


def test_models_share_what_the_kv_service_may_have() -> None:
    own = share_of_tiers("1GiB", "/kept:3GiB", "org/model", 2)
    assert own == {"kv_memory_host": f"{1 << 29}B", "kv_disk": f"/kept/org%2Fmodel:{3 << 29}B"}
    kept = load(KvConfig, own)
    assert parse_bytes(kept.kv_memory_host) == 1 << 29 and disk_tier(kept.kv_disk)[1] == 3 << 29
    assert share_of_tiers("1GiB", "", "model", 2) == {"kv_memory_host": f"{1 << 29}B"}
