"""Where settings come from, and what is refused."""

from pathlib import Path

import pytest

from services.config import (
    ClusterConfig,
    ConfigError,
    GatewayConfig,
    RouterConfig,
    WorkerConfig,
    load,
    parse_bytes,
    require,
)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("block_size = 8\nmax_running = 5\nthreads = 3\nport = 9000\n")
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "32")
    monkeypatch.setenv("TANDEM_MAX_RUNNING", "6")
    config = load(WorkerConfig, {"max_running": 7, "dtype": None}, file)
    assert (config.threads, config.block_size, config.max_running, config.dtype) == (3, 32, 7, "auto")
    assert load(GatewayConfig, {}, file).port == 9000


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (WorkerConfig, {"dtype": "int3"}, "allowed: auto, float32, bfloat16, float16"),
        (WorkerConfig, {"block_size": 0}, r"block_size \(--block-size\): 0 is less than 1"),
        (WorkerConfig, {"block_size": "many"}, "block_size"),
        (WorkerConfig, {"kv_memory": "lots"}, "is not a size"),
        (WorkerConfig, {"kv_memory": "-1GiB"}, "not positive"),
        (RouterConfig, {"policy": "best"}, "allowed: prefix"),
        (RouterConfig, {"colour": "red"}, "no setting 'colour'"),
        (RouterConfig, {"bind": "192.0.2.1"}, "cluster key is needed"),
        (RouterConfig, {"bind": "0.0.0.0", "cluster_key": "k" * 32}, "others can call"),
        (RouterConfig, {"cluster": "a b"}, "must be a word"),
        (RouterConfig, {"cluster": "a*"}, "must be a word"),
        (RouterConfig, {"state": "localhost:6379"}, "redis://"),
        (GatewayConfig, {"port": 70000}, "70000 is more than 65535"),
        (GatewayConfig, {"request_timeout": float("nan")}, "request_timeout"),
        (GatewayConfig, {"worker_wait": -1}, "worker_wait"),
        (GatewayConfig, {"host": "192.0.2.1"}, "API keys are needed"),
        (GatewayConfig, {"host": "0.0.0.0"}, "API keys are needed"),
        (GatewayConfig, {"admin_host": "192.0.2.1", "host": "192.0.2.1", "open_to_all": "yes"}, "TANDEM_ADMIN_KEY"),
        (GatewayConfig, {"admin_host": "192.0.2.1", "admin_key": "short"}, "admin_key.*shorter than 16"),
    ],
)
def test_bad_values_are_named(kind: type[WorkerConfig], flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(kind, flags)


def test_other_addresses_need_a_key() -> None:
    assert load(RouterConfig, {"bind": "192.0.2.1", "cluster_key": "k" * 32}).bind == "192.0.2.1"
    assert load(RouterConfig, {"bind": "::1"}).bind == "::1"


@pytest.mark.parametrize(
    "flags",
    [
        {"api_keys": "one"},
        {"api_keys_file": "keys.toml"},
        {"open_to_all": True},
        {"open_to_all": "true", "admin_key": "k" * 16},
    ],
)
def test_a_gateway_beyond_loopback_needs_keys_or_says_that_it_is_open(flags: dict[str, object]) -> None:
    assert load(GatewayConfig, {"host": "192.0.2.1"} | flags).host == "192.0.2.1"
    if "admin_key" in flags:
        assert load(GatewayConfig, {"host": "192.0.2.1", "admin_host": "192.0.2.1"} | flags).admin_host == "192.0.2.1"


def test_the_source_of_a_bad_value_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("max_running = -1\n")
    with pytest.raises(ConfigError, match=r"max_running \(.*tandem\.toml\)"):
        load(WorkerConfig, {}, file)
    monkeypatch.setenv("TANDEM_MAX_RUNNING", "several")
    with pytest.raises(ConfigError, match=r"max_running \(TANDEM_MAX_RUNNING\): 'several'"):
        load(WorkerConfig, {}, file)


def test_one_file_serves_all_roles_but_hides_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('policy = "random"\nport = 9000\nblock_size = 8\n')
    assert load(RouterConfig, {}, file).policy == "random"
    file.write_text("blocksize = 8\n")
    with pytest.raises(ConfigError, match="no setting 'blocksize'"):
        load(RouterConfig, {}, file)


@pytest.mark.parametrize(("name", "value"), [("cluster_key", "hunter2"), ("state", "http://:hunter2@host")])
def test_secrets_are_not_in_messages(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TANDEM_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"TANDEM_{name.upper()}") as caught:
        load(RouterConfig, {})
    assert "hunter2" not in str(caught.value)


class Switches(ClusterConfig, kw_only=True):
    flag: bool = True


@pytest.mark.parametrize(
    ("text", "value"),
    [("false", False), ("False", False), ("0", False), ("no", False), ("", False), ("true", True), ("1", True)],
)
def test_booleans_of_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_FLAG", text)
    assert load(Switches, {}).flag is value


def test_other_words_are_no_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_FLAG", "maybe")
    with pytest.raises(ConfigError, match="neither true nor false"):
        load(Switches, {})


def test_required_settings() -> None:
    with pytest.raises(ConfigError, match="TANDEM_STATE"):
        require(load(RouterConfig, {}), "state")
    require(load(RouterConfig, {"state": "redis://127.0.0.1"}), "state")


@pytest.mark.parametrize("url", ["redis://h:abc/0", "redis://:secret/x@h:1", "redis://[::1", "redis://h?db=x&no=1"])
def test_servers_that_no_url_can_name(url: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT/NUMBER") as raised:
        load(RouterConfig, {"state": url})
    assert "secret" not in str(raised.value)
    load(RouterConfig, {"state": "rediss://me:se%2Fcret@[::1]:6380/3"})
    load(RouterConfig, {"state": "unix:///run/redis.sock?db=3"})


def test_sizes() -> None:
    assert parse_bytes("512MiB") == 512 << 20
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("4096") == 4096
    assert parse_bytes("2TiB") == 2 << 40 and parse_bytes("2tb") == 2 * 10**12
    for wrong in ("infMiB", "nan", "1e999", "GiB", "1XiB"):
        with pytest.raises(ConfigError, match="not a size"):
            parse_bytes(wrong)


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(RouterConfig, {}, tmp_path / "bad.toml")
