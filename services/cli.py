"""The `tandem` command. Each subcommand imports what it needs, so that a gateway starts in a second, without torch."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import app as bench
from services.explain import app as router_app
from services.kv import app as kv

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tandem: disaggregated LLM serving. `tandem up` starts a cluster on this machine; `tandem chat` talks to it.",
    rich_markup_mode="markdown",
)


app.add_typer(bench, name="bench")
app.add_typer(kv, name="kv")
app.add_typer(router_app, name="router")


class Role(StrEnum):
    """What a process of the cluster does."""

    gateway = "gateway"
    router = "router"
    prefill = "prefill"
    decode = "decode"
    aggregated = "aggregated"


ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; flags and TANDEM_* win.")]


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder, .gguf file, or smollm2.  [default: SmolLM2-135M-Instruct]")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.  [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.  [default: 1]")] = None,
    aggregated: Annotated[int, typer.Option(help="Workers that do both; then no others by default.")] = 0,
    routers: Annotated[int, typer.Option(help="Routers; requests are spread over them.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP port.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any.  [default: 8000]")] = None,
    state: Annotated[
        str | None, typer.Option(help="redis://... of the cluster state; default: an embedded server.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout.")] = False,
    config: ConfigFile = None,
    prefill_setting: Annotated[
        list[str] | None, typer.Option(help="Of prefill workers alone; repeatable.", metavar="NAME=VALUE")
    ] = None,
    decode_setting: Annotated[
        list[str] | None, typer.Option(help="Of decode workers alone, as block_size=64.", metavar="NAME=VALUE")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.  [default: 16]")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of each worker, instead of --kv-memory.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV memory of each worker.  [default: 1GiB; on cuda: what is left]")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, tokens.")] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step.  [default: 512; on cuda: 1280]")
    ] = None,
    max_mixed_prefill_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt tokens of a step with decodes.  [default: 128 on decode workers, else all]"),
    ] = None,
    max_overtaking: Annotated[
        int | None, typer.Option(help="Times its own tokens that a prompt gives way to shorter ones.  [default: 4]")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Requests computed at once.  [default: 64; on cuda: 256]")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of each worker.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.  [default: float32; on cuda: bfloat16]")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="fp8 or int8: round weights while loading.  [default: auto, as they are stored]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="fp8: KV cache of one byte a number.  [default: as dtype]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: each worker has a CUDA device of its own, if there are enough.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Processes that share the model of each worker.  [default: 1]")
    ] = None,
    dummy_seed: Annotated[int | None, typer.Option(help="Random weights from this seed, for benchmarks.")] = None,
    connector: Annotated[
        str | None, typer.Option(help="auto, shared_memory, tcp, zmq, gloo or nixl; on cuda: cuda_ipc, nccl or nixl.")
    ] = None,
    model_aliases: Annotated[
        str | None,
        typer.Option(help="Other names of the model that requests may use, comma separated.", metavar="ALIAS=MODEL"),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="prefix, overlap, history, session, two_choices, least_outstanding, round_robin or random: where "
            "requests go.  [default: prefix]"
        ),
    ] = None,
    local_prefill_tokens: Annotated[
        int | None, typer.Option(help="Shorter uncached prompts are prefilled where they decode.")
    ] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token that placements try to keep to.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Seconds for each token after it that placements try to keep to.")
    ] = None,
    fetch_tokens: Annotated[
        int | None, typer.Option(help="Longer prefixes are fetched from the worker that has them; 0: never.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Requests that wait until a worker has room; more get 429.  [default: 1024]")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Start a cluster on this machine: gateway, router, workers and cluster state.

    Examples:

      tandem up

      tandem up --prefill 1 --decode 2 --model ./Qwen3-0.6B --port 9000

      tandem up --aggregated 1

      tandem up --decode-setting block_size=64 --decode-setting kv_dtype=fp8
    """
    from services.config import config_file
    from services.embedded_state import StateServerError
    from services.logs import configure
    from services.prepare import StartFailed
    from services.process import run
    from services.up import UpOptions
    from services.up import up as start

    flags = dict(
        model=model,
        host=host,
        port=port,
        state=state,
        block_size=block_size,
        kv_blocks=kv_blocks,
        kv_memory=kv_memory,
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        max_mixed_prefill_tokens=max_mixed_prefill_tokens,
        max_overtaking=max_overtaking,
        max_running=max_running,
        threads=threads,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        device=device,
        tensor_parallel=tensor_parallel,
        dummy_seed=dummy_seed,
        connector=connector,
        model_aliases=model_aliases,
        policy=policy,
        local_prefill_tokens=local_prefill_tokens,
        slo_ttft=slo_ttft,
        slo_tpot=slo_tpot,
        fetch_tokens=fetch_tokens,
        max_queue=max_queue,
        log_level=log_level,
    )
    configure("warning", "console")  # the children speak for themselves
    given = {name: value for name, value in flags.items() if value is not None}
    role_settings = {"prefill": prefill_setting or [], "decode": decode_setting or []}
    options = UpOptions(prefill, decode, aggregated, routers, json, config or config_file(), given, role_settings)
    with _told(StartFailed, StateServerError):
        run(start(options))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
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
    from services.config import ConfigError, GatewayConfig, RouterConfig, WorkerConfig, config_file, load, require
    from services.logs import configure
    from services.process import run

    with _told(ModelMismatch):
        flags = _flags(context.args)
        config = config or config_file()
        if role is Role.gateway:
            gateway = load(GatewayConfig, flags, config)
            require(gateway, "state", "model")
            configure(gateway.log_level, gateway.log_format)
            from services.gateway.serve import serve as serve_gateway

            run(serve_gateway(gateway))
        elif role is Role.router:
            router = load(RouterConfig, flags, config)
            require(router, "state")
            configure(router.log_level, router.log_format)
            from services.router.serve import serve as serve_router

            run(serve_router(router))
        else:
            worker = load(WorkerConfig, flags | {"role": role.value}, config)
            require(worker, "state", "model")
            configure(worker.log_level, worker.log_format)
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
        if name in ("cluster_key", "api_keys"):
            raise ConfigError(f"{flag}: everybody on the machine can read flags; set TANDEM_{name.upper()} instead")
        given = value if equals else next(rest, None)
        if given is None:
            raise ConfigError(f"{flag} has no value")
        flags[name] = given
    return flags


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the cluster answers.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; default: the first that is served.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    api_key: Annotated[str, typer.Option(envvar="TANDEM_API_KEY", help="Key of the gateway.")] = "",
) -> None:
    """Talk to a cluster in the terminal; shows TTFT and TPOT. Text on stdin is answered once.

    Example:

      echo "What is the capital of France?" | tandem chat
    """
    from services.chat import ChatFailed, chat_loop

    with _told(ChatFailed):
        chat_loop(url, model, system, max_tokens, temperature, api_key)


Workers = Annotated[list[str] | None, typer.Argument(metavar="[WORKER]...", help="Names, such as decode-0; none: all.")]
ClusterUrl = Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")]


@app.command()
def sleep(
    workers: Workers = None,
    drain: Annotated[bool, typer.Option("--drain", help="Let busy workers finish first, rather than refuse.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that --drain waits.")] = 60.0,
    url: ClusterUrl = "",
) -> None:
    """Have idle workers give their memory back: the KV cache and, on a GPU, everything; weights stay on the CPU.

    Examples:

      tandem sleep

      tandem sleep decode-1 --drain
    """
    from services.process import run
    from services.running import of_command
    from services.sleep import sleep as start

    with _told():
        run(start(of_command(url), workers or [], drain, timeout))


@app.command()
def wake(workers: Workers = None, url: ClusterUrl = "") -> None:
    """Have sleeping workers take their memory again and go on.

    Example:

      tandem wake
    """
    from services.process import run
    from services.running import of_command
    from services.sleep import wake as start

    with _told():
        run(start(of_command(url), workers or []))


@app.command()
def doctor(
    port: Annotated[int, typer.Option(help="HTTP port that `tandem up` would use.")] = 8000,
    state: Annotated[str, typer.Option(help="redis://... to check.")] = "",
    model: Annotated[str, typer.Option(help="Model to look for.")] = "SmolLM2-135M-Instruct",
    json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Check Python, torch, devices, ports, shared memory, Redis and model; says what to do."""
    from services.doctor import examine

    sys.exit(examine(port, state, model, json))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("tandem-serve"))


class _told:
    """Ends the command with a message instead of a traceback for errors that a user can mend."""

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        from engine.config import ModelError
        from engine.memory import DoesNotFit
        from services.config import ConfigError
        from services.supervisor import EXIT_CONFIGURATION

        configuration = isinstance(error, (ConfigError, ModelError, DoesNotFit, *self._errors))
        # An OSError without number has a message of ours; others are for the maintainers.
        if configuration or (isinstance(error, OSError) and error.errno is None):
            print(f"error: {error}", file=sys.stderr)
            sys.exit(EXIT_CONFIGURATION if configuration else 1)


def main() -> None:
    """Entry point."""
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
