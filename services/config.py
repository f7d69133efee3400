"""Configuration of every role: flags first, then `TANDEM_*` environment, then a TOML file, then defaults.

In the file and the environment a field has the name of its struct field: `TANDEM_BLOCK_SIZE=32`, `block_size = 32`.
"""

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, where it came from and what is allowed."""


class ClusterConfig(msgspec.Struct, kw_only=True):
    """What every process of a cluster knows."""

    cluster: str = "tandem"  # prefix of all keys in the cluster state
    state: str = ""  # redis://... of the cluster state
    cluster_key: str = ""  # secret shared by all processes; needed on addresses other than loopback
    bind: str = "127.0.0.1"  # address of internal sockets
    name: str = ""  # of this process, for people
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"


class GatewayConfig(ClusterConfig, kw_only=True):
    """The HTTP front."""

    model: str = ""  # folder with tokenizer and chat template
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str = ""  # comma separated; empty: no key needed
    max_in_flight: int = 1024  # sequences; more get 429
    max_body_bytes: int = 8 << 20
    request_timeout: float = 600.0  # seconds
    worker_wait: float = 5.0  # seconds to wait for a worker when there is none


class RouterConfig(ClusterConfig, kw_only=True):
    """The placement service."""

    policy: Literal["prefix", "least_outstanding", "round_robin", "random"] = "prefix"
    local_prefill_tokens: int = 32  # shorter uncached prompts are prefilled on the decode worker


class WorkerConfig(ClusterConfig, kw_only=True):
    """A prefill, decode or aggregated worker."""

    role: Literal["prefill", "decode", "aggregated"] = "aggregated"
    model: str = ""  # folder
    model_name: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    dummy_seed: int | None = None  # random weights instead of the folder's
    block_size: int = 16  # tokens
    kv_blocks: int = 0  # 0: as many as fit into kv_memory
    kv_memory: str = "1GiB"
    max_batched_tokens: int = 512  # token budget of a step
    max_running: int = 64
    max_waiting: int = 2048
    max_model_len: int = 0  # 0: the model's
    threads: int = 1  # compute threads
    connector: Literal["auto", "shared_memory", "zmq"] = "auto"
    drain_seconds: float = 5.0


C = TypeVar("C", bound=ClusterConfig)

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def load(kind: type[C], flags: dict[str, Any], file: Path | None = None) -> C:
    """A configuration of `kind`. Flags that are None were not given. Raises ConfigError."""
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for source, given in ((str(file), _read_file(file)), ("environment", _environment(hints)), ("flag", flags)):
        for name, value in given.items():
            if value is None:
                continue
            if name not in hints:
                if source == str(file):
                    continue  # the file serves all roles
                raise ConfigError(f"there is no setting {name!r} ({source})")
            values[name] = _convert(name, value, hints[name], source)
    config = kind(**values)
    _check(config)
    return config


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MiB` or `2GB`."""
    number = text.strip().rstrip("BbIiKkMmGg ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is not a size; write e.g. 512MiB or 2GiB") from None
    if size <= 0:
        raise ConfigError(f"the size {text!r} is not positive")
    return size


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error


def _environment(hints: dict[str, Any]) -> dict[str, str]:
    return {name: os.environ[key] for name in hints if (key := f"TANDEM_{name.upper()}") in os.environ}


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    if isinstance(value, str) and kind is bool:
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{name} ({source}): {value!r} is neither true nor false")
        return value.lower() in _TRUE
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        allowed = get_args(kind)
        choices = f"; allowed: {', '.join(map(str, allowed))}" if allowed and isinstance(allowed[0], str) else ""
        raise ConfigError(f"{name} ({source}): {value!r}: {error}{choices}") from error


def _check(config: ClusterConfig) -> None:
    if not config.cluster or any(c in config.cluster for c in " :*"):
        raise ConfigError(f"cluster: {config.cluster!r} must be a word without spaces, colons and stars")
    if not is_loopback(config.bind) and not config.cluster_key:
        raise ConfigError(
            f"bind: {config.bind} can be reached from other machines, so a cluster key is needed: "
            "set TANDEM_CLUSTER_KEY to the same secret everywhere (openssl rand -hex 32)"
        )
    for name, minimum in (
        ("block_size", 1),
        ("kv_blocks", 0),
        ("max_batched_tokens", 1),
        ("max_running", 1),
        ("max_waiting", 1),
        ("max_model_len", 0),
        ("threads", 1),
        ("max_in_flight", 1),
        ("max_body_bytes", 1024),
        ("local_prefill_tokens", 0),
        ("port", 0),
    ):
        if getattr(config, name, minimum) < minimum:
            raise ConfigError(f"{name}: {getattr(config, name)} is less than {minimum}")
    if isinstance(config, WorkerConfig):
        parse_bytes(config.kv_memory)
