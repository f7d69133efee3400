"""The `tandem` command. Each subcommand imports what it needs, so that a gateway starts in a second, without torch."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from bench.cli import app as bench
from bench.profile import profile
from bench.simulate import simulate
from services.cache import app as cache
from services.certificates import certificates
from services.explain import app as router_app
from services.keys import app as keys
from services.kv import app as kv
from services.members import drain, flip, status, undrain
from services.plan_explain import app as plan
from services.serve import ConfigFile, serve
from services.told import told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tandem: disaggregated LLM serving. `tandem up` starts a cluster on this machine; `tandem chat` talks to it.",
    rich_markup_mode="markdown",
)


app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")
app.add_typer(keys, name="keys")
app.add_typer(kv, name="kv")
app.add_typer(router_app, name="router")
app.add_typer(plan, name="plan")
for command in (certificates, simulate, profile, status, drain, undrain, flip):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


class Planning(StrEnum):
    """What the planner does."""

    off = "off"
    advise = "advise"
    act = "act"


class RayStrategy(StrEnum):
    """How Ray lays workers out over its nodes."""

    spread = "spread"
    pack = "pack"


@app.command()
def up(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Hugging Face folder, .gguf file, or smollm2; repeatable, with a name, workers and settings of its "
            "own as in qwen=./Qwen3-0.6B,decode=2,block_size=32.  [default: SmolLM2-135M-Instruct]",
            metavar="[NAME=]MODEL",
        ),
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers of each model.  [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers of each model.  [default: 1]")] = None,
    aggregated: Annotated[int, typer.Option(help="Workers that do both; then no others by default.")] = 0,
    routers: Annotated[int, typer.Option(help="Routers; requests are spread over them.")] = 1,
    on: Annotated[
        str, typer.Option(help="ray: run the workers on the Ray cluster of this machine; ray://HOST:10001: of another.")
    ] = "",
    ray_strategy: Annotated[
        RayStrategy, typer.Option(help="Workers on many nodes, so that few are lost with one, or on few.")
    ] = RayStrategy.spread,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP port.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any.  [default: 8000]")] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(help="File of API keys, made by `tandem keys new`; none: no key is needed.")
    ] = None,
    open_to_all: Annotated[
        bool | None, typer.Option("--open-to-all", help="Let a --host beyond this machine be used without API keys.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of metrics; 0: any.  [default: 8090, any if that is taken]")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="redis://... of the cluster state; default: an embedded server.")
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(help="Certificate of the processes, for mutual TLS; see `tandem certificates`.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="The CA that signs for processes of this cluster.")] = None,
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
    planner: Annotated[
        Planning | None,
        typer.Option(help="Start the planner, which tells how many workers of which role are wanted, or sees to it."),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV memory of each worker.  [default: 1GiB; on cuda: what is left]")
    ] = None,
    kv_memory_host: Annotated[
        str | None,
        typer.Option(
            help="Start the KV service: it keeps in so much memory, as 4GiB, what workers' caches have no room "
            "for, and any worker takes it from there where that is quicker than computing.  [default: none]"
        ),
    ] = None,
    kv_disk: Annotated[
        str | None,
        typer.Option(
            help="With --kv-memory-host: keep on disk, too, what it has no room for, and after a restart.  "
            "[default: none]",
            metavar="FOLDER:SIZE",
        ),
    ] = None,
    kv_redis: Annotated[
        str | None, typer.Option(help="Beneath that: a Redis, shared by clusters of one key.", metavar="URL")
    ] = None,
    kv_policy: Annotated[
        str | None,
        typer.Option(
            help="What goes first from host memory and disk: lru, lfu, arc, cost (long documents), or second_hit_lru, "
            "second_hit_arc (the disk takes what comes a second time).  [default: lru]",
            metavar="NAME",
        ),
    ] = None,
    kv_tenant_share: Annotated[
        float | None,
        typer.Option(help="Share of them that one tenant may take while others want room.  [default: 1.0]"),
    ] = None,
    kv_s3: Annotated[
        str | None,
        typer.Option(help="Beneath that: an object store, as s3://BUCKET or http://HOST:PORT/BUCKET.", metavar="URL"),
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
        typer.Option(help="Other names of models that requests may use, comma separated.", metavar="ALIAS=MODEL"),
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

      tandem up --on ray --prefill 2 --decode 4

      tandem up --decode-setting block_size=64 --decode-setting kv_dtype=fp8

      tandem up --model smollm2,aggregated=1 --model qwen=./Qwen3-0.6B,prefill=1,decode=2
    """
    from services.config import KINDS, config_file
    from services.embedded_state import StateServerError
    from services.logs import configure
    from services.parts import UpOptions
    from services.prepare import StartFailed
    from services.process import run
    from services.up import up as start

    settings = {name for kind in KINDS for name in kind.__struct_fields__} - {"model"}
    given = {name: value for name, value in context.params.items() if name in settings and value is not None}
    configure("warning", "console")  # the children speak for themselves
    role_settings = {"prefill": prefill_setting or [], "decode": decode_setting or []}
    options = UpOptions(
        prefill,
        decode,
        aggregated,
        routers,
        on=on,
        ray_strategy=ray_strategy.value,
        json=json,
        config=config or config_file(),
        flags=given,
        role_settings=role_settings,
        models=model or [],
    )
    with told(StartFailed, StateServerError):
        run(start(options))


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

    with told(ChatFailed):
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

    with told():
        run(start(of_command(url), workers or [], drain, timeout))


@app.command()
def wake(workers: Workers = None, url: ClusterUrl = "") -> None:
    """Have sleeping workers take their memory again and go on."""
    from services.process import run
    from services.running import of_command
    from services.sleep import wake as start

    with told():
        run(start(of_command(url), workers or []))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print tables once, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the state as JSON, and end.")] = False,
    admin: Annotated[str, typer.Option(help="Address of the admin port; default: that of the cluster here.")] = "",
    admin_key: Annotated[str, typer.Option(envvar="TANDEM_ADMIN_KEY", help="Key of the admin port.")] = "",
    url: ClusterUrl = "",
) -> None:
    """Show workers, links, routers and latencies of a running cluster, as the console does.

    Examples:

      tandem top

      tandem top --once
    """
    from services.admin_client import AdminClient
    from services.config import ConfigError
    from services.running import find
    from services.top import picture

    with told():
        client = AdminClient(admin or find(url).admin, admin_key)
        if json:
            print(client.text().decode())
        elif once:
            from rich.console import Console

            Console(highlight=False).print(picture(client.live()))
        else:
            client.live()  # what is wrong is told before the screen is taken
            try:
                from services.top_screen import Top
            except ModuleNotFoundError as error:
                what = "pip install 'tandem-serve[ui]', or give --once"
                raise ConfigError(f"the screen needs {error.name}: {what}") from error
            Top(client).run()


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
def probe() -> None:
    """Ask the process of this machine or container whether it is healthy; TANDEM_BIND and TANDEM_RPC_PORT say where.

    Example, with status 0 if it is:

      TANDEM_RPC_PORT=7000 tandem probe
    """
    from services.config import ClusterConfig, config_file, load
    from services.probe import probe as ask

    with told():
        sys.exit(ask(load(ClusterConfig, {}, config_file())))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("tandem-serve"))


def main() -> None:
    """Entry point."""
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
