"""`tandem kv`: how the KV cache moves between workers."""

import asyncio
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from kv_transfer.bench.measure import Report

app = typer.Typer(
    no_args_is_help=True,
    help="How the KV cache moves between workers.",
    rich_markup_mode="markdown",
)


class Connector(StrEnum):
    """What carries the bytes."""

    shared_memory = "shared_memory"
    tcp = "tcp"
    zmq = "zmq"
    gloo = "gloo"
    cuda_ipc = "cuda_ipc"
    nccl = "nccl"
    nixl = "nixl"


class Layout(StrEnum):
    """Which blocks of the pools are moved."""

    contiguous = "contiguous"
    scattered = "scattered"


@app.command()
def bench(
    connector: Annotated[
        Connector | None, typer.Option(help="Only this one.  [default: all that this machine can]")
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of a transfer, in whole blocks of 2 MiB; such as 64MiB.")] = "64MiB",
    layout: Annotated[
        Layout | None, typer.Option(help="Blocks side by side, or drawn from all over the pool.  [default: both]")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Measure how fast each connector moves KV from one process to another on this machine. Needs no cluster.

    The last pair of GB/s and µs is the raw link's.

    **GB/s** counts from the first push until the last byte is in its page; medians of rounds. It includes the
    checksums that connectors take of frames: all but shared_memory and what moves KV between devices. Blocks are those
    of a model of 8 billion parameters: 32 layers of 64 KiB. A transfer pushes one layer of all blocks after the other,
    as a prefill does; on devices all of them at once, as a prefill by a CUDA graph does.

    **verified** is the same until all pages were compared, too, as workers do: after the last byte each side takes a
    sum of each page, xxh3_64 on CPU, a weighted sum of its words on a CUDA device.

    **µs** is the same as GB/s for one layer of one block, of which no sum of pages is taken.

    **of limit** is GB/s as a share of the raw link's, which is measured in rounds that alternate with the connector's:
    for shared memory and nixl a plain copy by one process into memory of the other; between devices one copy of one
    buffer by a device's copy engine into the other process's device memory; for the others one socket over loopback
    that carries the same bytes between two processes, unpacked, unchecked, from and to one buffer. More than 100 % is
    possible where several streams use several cores.

    TCP, gloo, NCCL and NIXL run with a key and ZMQ with CURVE encryption, as in a cluster; ZMQ is also shown without.
    A busy machine slows connector and link alike; compare shares across runs, not GB/s.

    The first CUDA device receives and the second sends; where there is one, cuda_ipc and nixl copy within it and
    nccl is skipped.

    Examples:

      tandem kv bench

      tandem kv bench --connector tcp --size 256MiB --layout scattered

      tandem kv bench --connector cuda_ipc --size 1GiB

      tandem kv bench --json results.json
    """
    from services.config import ConfigError, parse_bytes

    try:
        num_bytes = parse_bytes(size)
        from kv_transfer.bench.measure import run
    except ModuleNotFoundError as error:
        _fail(f"the benchmark needs {error.name}: pip install 'tandem-serve[worker]'")
    except ConfigError as error:
        _fail(str(error))
    import msgspec

    from kv_transfer.connectors.base import ConnectorError

    layouts = [layout.value] if layout else [each.value for each in Layout]
    name = connector.value if connector else None
    try:
        report = run(name, num_bytes, layouts, shlex.join(["tandem", *sys.argv[1:]]), _tell)
    except ConnectorError as error:
        _fail(str(error))
    if report.results:
        _show(report)
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if report.failed:
        _fail("; ".join(report.failed))


@app.command()
def trace(
    request: Annotated[str, typer.Argument(help="The `id` of a response; none: the latest transfer.")] = "",
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a picture, with every layer.")] = False,
    url: Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")] = "",
) -> None:
    """Show when each step of a request's KV transfer happened, on both workers, in ms since the request arrived there.

    Bars: `░` compute of a layer, `█` its push, `─` time since the event before on that worker. **exposed** is what
    compute did not hide: from the last layer computed until the KV was committed at the decode worker.

    Each worker keeps its latest 512 transfers.

    Examples:

      tandem kv trace

      tandem kv trace cmpl-0123456789abcdef --json
    """
    import msgspec
    from rich.console import Console

    from services.config import ConfigError
    from services.kv_picture import show
    from services.kv_trace import gather
    from services.running import of_command
    from services.supervisor import EXIT_CONFIGURATION

    try:
        traces = asyncio.run(gather(of_command(url), request))
    except (ConfigError, ConnectionError) as error:
        _fail(str(error), EXIT_CONFIGURATION)
    if json:
        print(msgspec.json.format(msgspec.json.encode(traces), indent=1).decode())
        return
    console = Console()
    for each in traces:
        show(each, console)


def _fail(reason: str, status: int = 1) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(status)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _show(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    results = report.results
    devices = f"from {report.sender_device} to {report.receiver_device}"
    access = {None: "one device", True: "which access each other's memory", False: "which share no memory"}
    # The columns after "raw link" are the link's.
    table = Table(
        "connector",
        "layout",
        title=f"KV between two processes, {results[0].bytes >> 20} MiB a transfer",
        caption=f"CUDA: {devices}, {access[report.peer_access]}" if report.sender_device else None,
    )
    for name in ("GB/s", "verified", "µs", "raw link", "GB/s", "µs", "of limit"):
        table.add_column(name, justify="left" if name == "raw link" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.connector,
            result.layout,
            f"{result.gb_per_s:.2f}",
            f"{result.verified_gb_per_s:.2f}",
            f"{result.latency_us:.0f}",
            result.limit,
            f"{result.limit_gb_per_s:.2f}",
            f"{result.limit_latency_us:.0f}",
            f"{result.fraction_of_limit:.0%}",
        )
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)
