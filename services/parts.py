"""The processes of a cluster that `tandem up` starts: their roles, and what each is told that others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from services.config import ClusterConfig, ConfigError, WorkerConfig, disk_tier, parse_bytes
from services.prepare import StartFailed

WORKER_ROLES = ("prefill", "decode", "aggregated")


@dataclass
class UpOptions:
    """What the command line says."""

    prefill: int | None = None
    decode: int | None = None
    aggregated: int = 0
    routers: int = 1
    on: str = ""  # ray, or ray://HOST:PORT: where workers run; empty: here
    ray_strategy: Literal["spread", "pack"] = "spread"
    json: bool = False
    config: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)  # settings of any role, by field name
    role_settings: dict[str, list[str]] = field(default_factory=dict)  # NAME=VALUE, of workers of one role alone
    models: list[str] = field(default_factory=list)  # each as `ModelFlag.parse` takes it; []: that of the settings


@dataclass(frozen=True, slots=True)
class ModelFlag:
    """A model that is to be served, and its workers."""

    model: str  # folder, GGUF file or the default's name; "": as the settings say
    name: str = ""  # "": that of the folder
    workers: dict[str, int] = field(default_factory=dict)  # by role; {}: as the command line says of all models
    settings: dict[str, str] = field(default_factory=dict)  # of its workers alone

    @classmethod
    def parse(cls, text: str) -> ModelFlag:
        """Of `[NAME=]MODEL[,ROLE=COUNT][,SETTING=VALUE]...`, or of a path that there is. Raises ConfigError."""
        if text and Path(text).expanduser().exists():
            return cls(text)
        first, *rest = text.split(",")
        name, equals, model = first.partition("=")
        if not equals:
            name, model = "", first
        if not model or (equals and not name):
            raise ConfigError(f"--model {text}: write MODEL or NAME=MODEL, then e.g. ,prefill=1,decode=2")
        workers, settings = {}, []
        for part in rest:
            role, _, count = part.partition("=")
            if role in WORKER_ROLES:
                if not count.isdecimal():
                    raise ConfigError(f"--model {text}: {part!r} does not count workers; write {role}=1")
                workers[role] = int(count)
            else:
                settings.append(part)
        return cls(model, name, workers, worker_settings("--model", settings))


@dataclass(slots=True)
class Part:
    """A process. `own`: settings that it alone is told; `model`: number of its model among those of the cluster."""

    role: str
    own: dict[str, Any] = field(default_factory=dict)
    model: int | None = None


def share_of_tiers(memory: str, disk: str, model: str, count: int) -> dict[str, str]:
    """Settings of a model's KV service, of `count` on one machine: an equal share, and a folder of its own."""
    own = {"kv_memory_host": f"{parse_bytes(memory) // count}B"}
    if disk:
        folder, size = disk_tier(disk)
        own["kv_disk"] = f"{folder / quote(model, safe='')}:{size // count}B"
    return own


def parts_of(options: UpOptions, models: list[ModelFlag]) -> list[Part]:
    """One prefill and one decode worker of each model unless others were asked for. Raises StartFailed, ConfigError."""
    if options.routers < 1:
        raise StartFailed("nobody would place requests: give at least --routers 1")
    of_roles = {role: worker_settings(f"--{role}-setting", texts) for role, texts in options.role_settings.items()}
    parts = [*(Part("router") for _ in range(options.routers)), Part("gateway")]
    flags = {"prefill": options.prefill, "decode": options.decode, "aggregated": options.aggregated}
    for number, model in enumerate(models):
        for role in _roles(model.workers or flags, model):
            parts.append(Part(role, of_roles.get(role, {}) | model.settings, number))
    return parts


def named(parts: list[Part]) -> Iterator[tuple[str, Part]]:
    """Each process with its name."""
    counts: Counter[str] = Counter()
    for part in parts:
        number = counts[part.role]
        counts[part.role] += 1
        yield f"{part.role}-{number}" if number or part.role in WORKER_ROLES else part.role, part


def _roles(asked: dict[str, int | None] | dict[str, int], model: ModelFlag) -> list[str]:
    aggregated = asked.get("aggregated") or 0
    default = 0 if aggregated else 1
    counts = {role: default if asked.get(role) is None else asked[role] or 0 for role in ("prefill", "decode")}
    counts["aggregated"] = aggregated
    if min(counts.values()) < 0:
        raise StartFailed("--prefill, --decode and --aggregated count workers: none can be negative")
    if counts["decode"] + aggregated == 0:
        of = f" for {model.name or model.model}" if model.workers else ""
        raise StartFailed(f"nobody would decode{of}: give at least --decode 1 or --aggregated 1")
    return [role for role, count in counts.items() for _ in range(count)]


def worker_settings(flag: str, texts: list[str]) -> dict[str, str]:
    """Settings of NAME=VALUE that `flag` gave. Raises ConfigError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in WorkerConfig.__struct_fields__:
            raise ConfigError(f"{flag} {text}: write NAME=VALUE with a setting of workers, as block_size=32")
        if name in ClusterConfig.__struct_fields__ or name in ("role", "model", "model_name"):
            raise ConfigError(f"{flag} {text}: {name} is not set for some workers alone")
        found[name] = value
    return found
