"""`tandem serve`: one process of a cluster."""

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.told import told

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; flags and TANDEM_* win.")]


class Role(StrEnum):
    """What a process of the cluster does."""

    gateway = "gateway"
    router = "router"
    prefill = "prefill"
    decode = "decode"
    aggregated = "aggregated"
    kv = "kv"
    planner = "planner"


def serve(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="What this process does.")],
    config: ConfigFile = None,
) -> None:
    """Run one process of a cluster. Every setting of the role is a flag, too; docs/configuration.md lists them.

    Examples:

      tandem serve router --state redis://127.0.0.1:6379/0

      tandem serve decode --state redis://127.0.0.1:6379/0 --model ./Qwen3-0.6B --kv-memory 4GiB

      TANDEM_STATE=redis://127.0.0.1:6379/0 TANDEM_MODEL=./Qwen3-0.6B tandem serve gateway --port 8000
    """
    from services.cluster_state import ModelMismatch
    from services.config import (
        ConfigError,
        GatewayConfig,
        KvConfig,
        PlannerConfig,
        RouterConfig,
        WorkerConfig,
        config_file,
        load,
        require,
    )
    from services.process import run, set_up

    with told(ModelMismatch):
        flags = _flags(context.args)
        config = config or config_file()
        unnamed = f"{role.value}-{socket.gethostname()}"
        if role is Role.gateway:
            gateway = load(GatewayConfig, flags, config)
            gateway.name = gateway.name or unnamed
            require(gateway, "state", "model")
            set_up(gateway, role.value)
            from services.gateway.serve import serve as serve_gateway

            run(serve_gateway(gateway))
        elif role is Role.router:
            router = load(RouterConfig, flags, config)
            router.name = router.name or unnamed
            require(router, "state")
            set_up(router, role.value)
            from services.router.serve import serve as serve_router

            run(serve_router(router))
        elif role is Role.planner:
            planner = load(PlannerConfig, flags, config)
            planner.name = planner.name or unnamed
            require(planner, "state")
            set_up(planner, role.value)
            from services.planner.serve import serve as serve_planner

            run(serve_planner(planner))
        elif role is Role.kv:
            kept = load(KvConfig, flags, config)
            kept.name = kept.name or unnamed
            require(kept, "state", "kv_memory_host")
            set_up(kept, role.value)
            try:
                from services.tier.serve import serve as serve_kv
            except ModuleNotFoundError as error:
                raise ConfigError(f"the KV service needs {error.name}: pip install 'tandem-serve[worker]'") from error

            run(serve_kv(kept))
        else:
            worker = load(WorkerConfig, flags | {"role": role.value}, config)
            worker.name = worker.name or unnamed
            require(worker, "state", "model")
            set_up(worker, role.value)
            try:
                from services.worker.serve import serve as serve_worker
            except ModuleNotFoundError as error:
                raise ConfigError(f"a worker needs {error.name}: pip install 'tandem-serve[worker]'") from error

            run(serve_worker(worker))


def _flags(arguments: list[str]) -> dict[str, str]:
    """Settings of `--name value` and `--name=value`. Raises ConfigError."""
    from services.config import ConfigError

    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"{argument!r} is not a flag: write --name value")
        if name in ("cluster_key", "api_keys", "admin_key"):
            raise ConfigError(f"{flag}: everybody on the machine can read flags; set TANDEM_{name.upper()} instead")
        given = value if equals else next(rest, None)
        if given is None:
            raise ConfigError(f"{flag} has no value")
        flags[name] = given
    return flags
