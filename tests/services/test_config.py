"""Where settings come from, and what is refused."""

from pathlib import Path

import pytest

from services.config import ConfigError, GatewayConfig, RouterConfig, WorkerConfig, load, parse_bytes


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("block_size = 8\nmax_running = 5\nthreads = 3\nport = 9000\n")
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "32")
    monkeypatch.setenv("TANDEM_MAX_RUNNING", "6")
    config = load(WorkerConfig, {"max_running": 7, "dtype": None}, file)
    assert (config.threads, config.block_size, config.max_running, config.dtype) == (3, 32, 7, "float32")
    assert load(GatewayConfig, {}, file).port == 9000


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (WorkerConfig, {"dtype": "int3"}, "allowed: float32, bfloat16, float16"),
        (WorkerConfig, {"block_size": 0}, "block_size: 0 is less than 1"),
        (WorkerConfig, {"block_size": "many"}, "block_size"),
        (WorkerConfig, {"kv_memory": "lots"}, "is not a size"),
        (WorkerConfig, {"kv_memory": "-1GiB"}, "not positive"),
        (RouterConfig, {"policy": "best"}, "allowed: prefix"),
        (RouterConfig, {"colour": "red"}, "no setting 'colour'"),
        (RouterConfig, {"bind": "0.0.0.0"}, "cluster key is needed"),
        (RouterConfig, {"cluster": "a b"}, "must be a word"),
    ],
)
def test_bad_values_are_named(kind: type[WorkerConfig], flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(kind, flags)


def test_other_addresses_need_a_key() -> None:
    assert load(RouterConfig, {"bind": "192.0.2.1", "cluster_key": "k" * 32}).bind == "192.0.2.1"
    assert load(RouterConfig, {"bind": "::1"}).bind == "::1"


def test_sizes() -> None:
    assert parse_bytes("512MiB") == 512 << 20
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("4096") == 4096


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(RouterConfig, {}, tmp_path / "bad.toml")
