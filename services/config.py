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
    model_aliases: str = ""  # ALIAS=MODEL, comma separated: other names that requests may use
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str = ""  # comma separated; empty: no key needed
    max_in_flight: int = 1024  # sequences; more get 429
    max_body_bytes: int = 8 << 20
    request_timeout: float = 600.0  # seconds
    worker_wait: float = 5.0  # seconds to wait for a worker when there is none


class RouterConfig(ClusterConfig, kw_only=True):
    """The placement service."""

    policy: Literal[
        "prefix", "overlap", "history", "session", "two_choices", "least_outstanding", "round_robin", "random"
    ] = "prefix"
    overlap_weight: float = 1.0  # of the policy overlap: what a block to prefill costs, in blocks kept
    overlap_temperature: float = 0.0  # of the policy overlap: 0 takes the best, more draws among the better ones
    max_queue: int = 1024  # requests that wait until a worker has room; more get 429
    local_prefill_tokens: int = 32  # shorter uncached prompts are prefilled on the decode worker; 0: none is
    slo_ttft: float = 0.0  # seconds to the first token that are the aim; 0: as few as possible
    slo_tpot: float = 0.0  # seconds for each token after it, likewise
    fetch_tokens: int = 256  # a prefix of so many tokens more is fetched from the worker that has it; 0: never


class WorkerConfig(ClusterConfig, kw_only=True):
    """A prefill, decode or aggregated worker."""

    role: Literal["prefill", "decode", "aggregated"] = "aggregated"
    model: str = ""  # folder
    model_name: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float32 on CPU, bfloat16 on CUDA
    quantization: Literal["auto", "fp8", "int8"] = (
        "auto"  # of linear layers' weights; auto: as they are in the checkpoint
    )
    kv_dtype: Literal["auto", "fp8"] = "auto"  # of the KV cache; auto: as dtype
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = 1  # processes, ranks, that share a worker's model
    first_device: int = 0  # of the visible CUDA devices, counted round; `tandem up` gives each worker its own
    dummy_seed: int | None = None  # random weights instead of the folder's
    block_size: int = 16  # tokens
    kv_blocks: int = 0  # 0: as many as fit into kv_memory
    kv_memory: str = "auto"  # on CPU 1 GiB; on a CUDA device what is left beside the model
    max_batched_tokens: int = 0  # token budget of a step; 0: 512 on CPU, 1,280 on CUDA
    max_mixed_prefill_tokens: int = 0  # prompt tokens of a step with decodes; 0: by role
    max_overtaking: int = 4  # a prompt gives way to later, shorter ones for so many times its own tokens
    max_running: int = 0  # 0: 64 on CPU, 256 on CUDA
    max_waiting: int = 2048
    max_model_len: int = 0  # 0: the model's
    threads: int = 1  # compute threads
    worker_port: int = 0  # of the gRPC server; 0: any free one
    connector: Literal["auto", "shared_memory", "tcp", "zmq", "gloo", "cuda_ipc", "nccl", "nixl"] = "auto"
    kv_codec: Literal["auto", "off"] = "auto"  # packs KV on tcp links that are slower than the packing
    drain_seconds: float = 5.0


C = TypeVar("C", bound=ClusterConfig)

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SECRET = ("cluster_key", "api_keys", "state")  # a URL may hold a password: never in a message
_NO_LIMIT = 1 << 48
_BOUNDS: dict[str, tuple[float, float]] = {
    "block_size": (1, 1024),
    "kv_blocks": (0, _NO_LIMIT),
    "max_batched_tokens": (0, _NO_LIMIT),
    "max_mixed_prefill_tokens": (0, _NO_LIMIT),
    "max_overtaking": (0, 1000),
    "max_running": (0, _NO_LIMIT),
    "max_waiting": (1, _NO_LIMIT),
    "max_model_len": (0, _NO_LIMIT),
    "threads": (1, 1024),
    "tensor_parallel": (1, 64),
    "first_device": (0, 1 << 20),
    "dummy_seed": (0, (1 << 63) - 1),
    "drain_seconds": (0, 86400),
    "max_in_flight": (1, _NO_LIMIT),
    "max_body_bytes": (1024, _NO_LIMIT),
    "request_timeout": (0.001, 86400),
    "worker_wait": (0, 86400),
    "local_prefill_tokens": (0, _NO_LIMIT),
    "max_queue": (0, _NO_LIMIT),
    "fetch_tokens": (0, _NO_LIMIT),
    "slo_ttft": (0, 86400),
    "slo_tpot": (0, 86400),
    "overlap_weight": (0, 1000),
    "overlap_temperature": (0, 1000),
    "port": (0, 65535),
    "worker_port": (0, 65535),
}


def config_file() -> Path | None:
    """The file that the environment names."""
    named = os.environ.get("TANDEM_CONFIG")
    return Path(named) if named else None


def load(kind: type[C], flags: dict[str, Any], file: Path | None = None) -> C:
    """A configuration of `kind`. Flags that are None were not given. Raises ConfigError."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, (value, source) in given(kind, flags, file).items():
        values[name] = _convert(name, value, hints[name], source)
        _check(name, values[name], source)
    config = kind(**values)
    if not is_loopback(config.bind) and not config.cluster_key:
        raise ConfigError(
            f"bind: {config.bind} can be reached from other machines, so a cluster key is needed: "
            "set TANDEM_CLUSTER_KEY to the same secret everywhere (openssl rand -hex 32)"
        )
    return config


def given(kind: type[ClusterConfig], flags: dict[str, Any], file: Path | None = None) -> dict[str, tuple[Any, str]]:
    """The settings of `kind` that somebody gave: name -> (value as given, where it was given)."""
    found: dict[str, tuple[Any, str]] = {}
    for name, value in _read_file(file).items():
        if name in kind.__struct_fields__:
            found[name] = value, str(file)
    for name in kind.__struct_fields__:
        if (variable := f"TANDEM_{name.upper()}") in os.environ:
            found[name] = os.environ[variable], variable
    for name, value in flags.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            if name not in kind.__struct_fields__:
                raise ConfigError(f"there is no setting {name!r} ({flag})")
            found[name] = value, flag
    return found


def require(config: ClusterConfig, *names: str) -> None:
    """Raises ConfigError if one of these settings is empty."""
    for name in names:
        if not getattr(config, name):
            raise ConfigError(f"{name} is not set: give --{name.replace('_', '-')}, or TANDEM_{name.upper()}")


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


def is_unspecified(host: str) -> bool:
    """Whether the address means all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_file(path: Path | None) -> dict[str, Any]:
    """One file serves all roles, so it may hold settings of each; what no role knows is a mistake."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    known = {name for kind in (GatewayConfig, RouterConfig, WorkerConfig) for name in kind.__struct_fields__}
    if unknown := sorted(content.keys() - known):
        raise ConfigError(f"there is no setting {unknown[0]!r} ({path})")
    return content


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    shown = "the value" if name in _SECRET else repr(value)
    if isinstance(value, str) and kind is bool:
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{name} ({source}): {shown} is neither true nor false")
        return value.lower() in _TRUE
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        allowed = get_args(kind)
        choices = f"; allowed: {', '.join(map(str, allowed))}" if allowed and isinstance(allowed[0], str) else ""
        raise ConfigError(f"{name} ({source}): {shown}: {error}{choices}") from error


def _check(name: str, value: Any, source: str) -> None:
    problem = ""
    if name in _BOUNDS and value is not None:
        least, most = _BOUNDS[name]
        if not least <= value <= most:  # NaN is not, either
            problem = f"{value} is less than {least}" if value < least else f"{value} is more than {most}"
    elif name == "kv_memory" and value != "auto":
        try:
            parse_bytes(value)
        except ConfigError as error:
            problem = str(error)
    elif name == "cluster" and (not value or any(c in value for c in " :*?[]\\")):
        problem = f"{value!r} must be a word without spaces and any of :*?[]\\"
    elif name == "cluster_key" and value and len(value) < 16:
        problem = "it is shorter than 16 characters; use e.g. `openssl rand -hex 32`"
    elif name == "bind" and is_unspecified(value):
        problem = f"{value!r} is no address that others can call: name one of this machine's own"
    elif name == "state" and value and not value.startswith(("redis://", "rediss://", "unix://")):
        problem = "it must begin with redis://, rediss:// or unix://"
    if problem:
        raise ConfigError(f"{name} ({source}): {problem}")
