"""Configuration of every role: flags first, then `TANDEM_*` environment, then a TOML file, then defaults.

In the file and the environment a field has the name of its struct field: `TANDEM_BLOCK_SIZE=32`, `block_size = 32`.
"""

import ipaddress
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import parse_qs, urlsplit

import msgspec

from services.redis_client import check_url


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, where it came from and what is allowed."""


Connector = Literal["auto", "shared_memory", "tcp", "zmq", "gloo", "cuda_ipc", "nccl", "nixl"]


class ClusterConfig(msgspec.Struct, kw_only=True):
    """What every process of a cluster knows."""

    cluster: str = "tandem"  # prefix of all keys in the cluster state
    state: str = ""  # redis://... of the cluster state
    cluster_key: str = ""  # secret shared by all processes; needed on addresses other than loopback
    tls_certificate: str = ""  # PEM file: with it, tls_key and tls_ca gRPC is mutual TLS
    tls_key: str = ""  # PEM file
    tls_ca: str = ""  # PEM file of the CAs that sign for members
    tls_name: str = "tandem"  # DNS name that every member's certificate has
    bind: str = "127.0.0.1"  # address of internal sockets; auto: that of this machine's name
    rpc_port: int = 0  # of the gRPC server; 0: any free one
    name: str = ""  # of this process, for people
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"


class GatewayConfig(ClusterConfig, kw_only=True):
    """The HTTP front."""

    model: str = ""  # folder with tokenizer and chat template
    model_name: str = ""
    more_models: str = ""  # NAME=FOLDER, comma separated: models that are served beside it
    model_aliases: str = ""  # ALIAS=MODEL, comma separated: other names that requests may use
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str = ""  # comma separated
    api_keys_file: str = ""  # of hashed keys, each with what it allows
    open_to_all: bool = False  # whether anybody may use an address beyond loopback without an API key
    admin_host: str = "127.0.0.1"
    admin_port: int = 8090  # metrics and whatever else is not for those who send requests; 0: any free one
    admin_key: str = ""  # opens the admin port; needed on addresses other than loopback
    max_in_flight: int = 1024  # sequences; more get 429
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0  # seconds that the body of a request may take to come
    request_timeout: float = 600.0  # seconds
    worker_wait: float = 5.0  # seconds to wait for a worker when there is none
    drain_seconds: float = 5.0  # to finish answers when the process is told to stop


class RouterConfig(ClusterConfig, kw_only=True):
    """The placement service."""

    policy: Literal[
        "prefix", "overlap", "history", "session", "two_choices", "least_outstanding", "round_robin", "random"
    ] = "prefix"
    overlap_weight: float = 1.0  # of the policy overlap: what a block to prefill costs, in blocks kept
    overlap_temperature: float = 0.0  # of the policy overlap: 0 takes the best, more draws among the better ones
    prefix_tolerance: float = 0.05  # of the policy prefix: costs that are so much higher than the least are as good
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
    connector: Connector = "auto"
    kv_codec: Literal["auto", "off"] = "auto"  # packs KV on tcp links that are slower than the packing
    drain_seconds: float = 5.0


class KvConfig(ClusterConfig, kw_only=True):
    """The KV service, which keeps prefixes beyond workers' caches."""

    kv_memory_host: str = ""  # host memory for them, as 4GiB
    kv_disk: str = ""  # FOLDER:SIZE: a tier beneath that, which a restart finds again
    kv_redis: str = ""  # redis://...: a tier beneath those that clusters of this name, key and model share
    kv_policy: Literal["lru", "lfu", "arc", "cost", "second_hit_lru", "second_hit_arc"] = "lru"  # of memory and disk
    kv_tenant_share: float = 1.0  # of memory and disk that one tenant's blocks may take while others want room
    kv_pin_share: float = 0.5  # of host memory that pinned prefixes may hold; 0: nothing is pinned
    kv_pin_tenant_share: float = 0.25  # of host memory that those of one tenant's sessions may hold
    kv_pin_seconds: float = 3600.0  # longest time that a request pins its prefix for
    kv_s3: str = ""  # s3://BUCKET or http(s)://HOST:PORT/BUCKET: the same in an object store
    kv_compression: Literal["off", "zstd"] = "off"  # of what Redis and S3 keep; without loss
    model_name: str = ""  # of workers whose blocks are kept; "": of those that come first
    connector: Connector = "auto"
    kv_codec: Literal["auto", "off"] = "auto"  # as of workers
    drain_seconds: float = 5.0


STORES = ("kv_disk", "kv_redis", "kv_s3")  # settings of what is beneath host memory, nearest first


class PlannerConfig(ClusterConfig, kw_only=True):
    """What watches the traffic and says, or sees to it, how many workers of which role there are."""

    planner: Literal["off", "advise", "act"] = "advise"  # advise: decisions are told, and nothing is done
    planner_interval: float = 30.0  # seconds between two decisions
    planner_ttft: float = 2.0  # seconds to the first token that are the aim
    planner_tpot: float = 0.1  # seconds for each token after it, likewise
    planner_attainment: float = 0.9  # share of requests that is to keep to both
    planner_minimum: str = ""  # of workers, as prefill=1,decode=1; decode=0: none need stay
    planner_maximum: str = ""  # likewise
    planner_workers: int = 0  # of a model, in all; 0: as many as there were at once
    planner_roles: str = "prefill,decode,aggregated"  # that it may give to workers
    planner_fixed: str = ""  # names and roles of workers that are left alone, comma separated
    planner_profile: str = ""  # file of `tandem profile`; without one an H200's times are corrected by what is measured
    planner_cool_down: float = 60.0  # seconds after a flip until the next one; five times as long before workers go
    planner_start: float = 60.0  # seconds that a worker takes to start
    planner_finish: float = 5.0  # seconds that streams of a worker have before they move, when it takes another role
    planner_actuator: Literal["none", "local", "kubernetes"] = "none"  # who starts and ends workers
    planner_deployments: str = ""  # of kubernetes: [MODEL/]prefill=NAME,decode=NAME in the pod's own namespace
    planner_log: str = ""  # file for decisions, a JSON line each


KINDS: tuple[type[ClusterConfig], ...] = (GatewayConfig, RouterConfig, WorkerConfig, KvConfig, PlannerConfig)

C = TypeVar("C", bound=ClusterConfig)

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECRET = (
    "cluster_key",
    "api_keys",
    "admin_key",
    "state",
    "kv_redis",
    "kv_s3",
)  # a URL may hold a password: never in a message
_NO_LIMIT = 1 << 48
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BOUNDS: dict[str, tuple[float, float]] = {
    "block_size": (1, 1024),
    "kv_blocks": (0, _NO_LIMIT),
    "kv_tenant_share": (0.01, 1),
    "kv_pin_share": (0, 0.9),
    "kv_pin_tenant_share": (0, 0.9),
    "kv_pin_seconds": (1, 7 * 86400),
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
    "body_timeout": (0.001, 86400),
    "request_timeout": (0.001, 86400),
    "worker_wait": (0, 86400),
    "local_prefill_tokens": (0, _NO_LIMIT),
    "max_queue": (0, _NO_LIMIT),
    "fetch_tokens": (0, _NO_LIMIT),
    "slo_ttft": (0, 86400),
    "slo_tpot": (0, 86400),
    "overlap_weight": (0, 1000),
    "overlap_temperature": (0, 1000),
    "prefix_tolerance": (0, 10),
    "planner_interval": (0.1, 1200),  # what is shed lasts three times as long, and routers take an hour at the most
    "planner_ttft": (0.001, 86400),
    "planner_tpot": (0.0001, 86400),
    "planner_attainment": (0.01, 0.9999),
    "planner_workers": (0, 1 << 20),
    "planner_cool_down": (0, 86400),
    "planner_start": (0.1, 86400),
    "planner_finish": (0, 600),
    "port": (0, 65535),
    "admin_port": (0, 65535),
    "rpc_port": (0, 65535),
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
    if config.bind == "auto":
        config.bind = _own_address()
    if not is_loopback(config.bind) and not config.cluster_key:
        raise ConfigError(
            f"bind: {config.bind} can be reached from other machines, so a cluster key is needed: "
            "set TANDEM_CLUSTER_KEY to the same secret everywhere (openssl rand -hex 32)"
        )
    if isinstance(config, GatewayConfig):
        _check_doors(config)
    if isinstance(config, KvConfig):
        below = [name for name in STORES if getattr(config, name)]
        if below and not config.kv_memory_host:
            raise ConfigError(
                f"{below[0]}: what lies there passes through host memory: give --kv-memory-host, as 1GiB, too"
            )
    return config


def _check_doors(config: GatewayConfig) -> None:
    """Nobody opens a port to other machines by mistake. Raises ConfigError."""
    if not (is_loopback(config.host) or config.api_keys or config.api_keys_file or config.open_to_all):
        raise ConfigError(
            f"host: {config.host!r} can be reached from other machines, so API keys are needed: name a file of them by "
            "--api-keys-file (`tandem keys new` makes keys), set TANDEM_API_KEYS, or give --open-to-all if whoever "
            "reaches the port may use it"
        )
    if not is_loopback(config.admin_host) and not config.admin_key:
        raise ConfigError(
            f"admin_host: {config.admin_host!r} can be reached from other machines, so a key is needed: "
            "set TANDEM_ADMIN_KEY (openssl rand -hex 32)"
        )


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
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size; write e.g. 512MiB or 2GiB") from None
    if size <= 0:
        raise ConfigError(f"the size {text!r} is not positive")
    return size


def disk_tier(text: str) -> tuple[Path, int]:
    """Folder and bytes of FOLDER:SIZE. Raises ConfigError."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise ConfigError(f"{text!r} is not FOLDER:SIZE; write e.g. /var/lib/tandem:20GiB")
    return Path(folder), parse_bytes(size)


def bucket_of(url: str) -> tuple[str, str, str]:
    """Endpoint, bucket and region of `s3://BUCKET` or `http(s)://HOST:PORT/BUCKET`, each with `?region=` or without.

    The endpoint is empty for AWS. Raises ConfigError, without anything secret.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError("its HOST:PORT is none: write s3://BUCKET, or http(s)://HOST:PORT/BUCKET") from None
    if parts.username or parts.password:
        raise ConfigError("credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, never in the URL")
    options = parse_qs(parts.query)
    on_aws = parts.scheme == "s3"
    bucket = parts.netloc if on_aws else parts.path.strip("/")
    if (
        parts.scheme not in ("s3", "http", "https")
        or not _BUCKET.fullmatch(bucket)
        or not (parts.hostname and parts.path.strip("/") == ("" if on_aws else bucket))
        or options.keys() - {"region"}
    ):
        raise ConfigError(
            "write s3://BUCKET, or http(s)://HOST:PORT/BUCKET of another server, with ?region= or without"
        )
    region = options["region"][-1] if options else os.environ.get("AWS_REGION", "us-east-1")
    return "" if on_aws else f"{parts.scheme}://{parts.netloc}", bucket, region


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


def _own_address() -> str:
    """The IPv4 address that this machine's name stands for: in a container the one in its network."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"bind: auto: this machine's name {name} has no address ({error}); name one") from error
    if is_loopback(address):
        raise ConfigError(f"bind: auto: this machine's name {name} stands for {address}, which others cannot call")
    return address


def _read_file(path: Path | None) -> dict[str, Any]:
    """One file serves all roles, so it may hold settings of each; what no role knows is a mistake."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    known = {name for kind in KINDS for name in kind.__struct_fields__}
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
    elif (name == "kv_memory" and value != "auto") or (name == "kv_memory_host" and value):
        try:
            parse_bytes(value)
        except ConfigError as error:
            problem = str(error)
    elif name == "kv_disk" and value:
        try:
            disk_tier(value)
        except ConfigError as error:
            problem = str(error)
    elif name == "kv_s3" and value:
        try:
            bucket_of(value)
        except ConfigError as error:
            problem = str(error)
    elif name == "kv_redis" and value:
        try:
            check_url(value)
        except ValueError as error:
            problem = str(error)
    elif name == "cluster" and (not value or any(c in value for c in " :*?[]\\")):
        problem = f"{value!r} must be a word without spaces and any of :*?[]\\"
    elif name in ("cluster_key", "admin_key") and value and len(value) < 16:
        problem = "it is shorter than 16 characters; use e.g. `openssl rand -hex 32`"
    elif name == "bind" and is_unspecified(value):
        problem = f"{value!r} is no address that others can call: name one of this machine's own"
    elif name == "state" and value:
        try:
            check_url(value)
        except ValueError as error:
            problem = str(error)
    if problem:
        raise ConfigError(f"{name} ({source}): {problem}")
