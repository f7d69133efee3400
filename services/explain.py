"""`tandem router`: why requests went where they went."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from services.rpc import router_pb2
    from services.running import RunningCluster

app = typer.Typer(no_args_is_help=True, help="Why requests went where they went.", rich_markup_mode="markdown")
_SECONDS = 3.0


@app.callback()
def _commands() -> None:
    pass


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="The `id` of a response; none: the latest placement.")] = "",
    json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    url: Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")] = "",
) -> None:
    """Show what the router knew of the best candidates for a request, their costs, and which one it took.

    The least **cost** wins; what it counts depends on the policy. **cached** tokens of the prompt are there,
    **expected** ones also by requests under way, **fetchable** ones on another worker. **queued** are tokens of other
    prompts to compute, **kept** those of answers under way, **waiting** requests have no KV blocks yet. **not** names
    workers that could not be taken, such as those whose circuit breaker is open.

    Each router keeps its latest 512 placements.

    Examples:

      tandem router explain

      tandem router explain cmpl-0123456789abcdef --json
    """
    from rich.console import Console

    from services.config import ConfigError
    from services.running import of_command
    from services.supervisor import EXIT_CONFIGURATION

    try:
        found = asyncio.run(_gather(of_command(url), request))
    except (ConfigError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    if json:
        import msgspec
        from google.protobuf.json_format import MessageToDict

        fields = [
            MessageToDict(each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for each in found
        ]
        print(msgspec.json.format(msgspec.json.encode(fields), indent=1).decode())
        return
    console = Console()
    for each in found:
        _show(each, console)


async def _gather(running: "RunningCluster", request: str) -> "list[router_pb2.Explanation]":
    """Placements by all routers, oldest first. Raises ConfigError if there are none."""
    import grpc

    from services.config import ConfigError
    from services.rpc import router_pb2, router_pb2_grpc
    from services.rpc_server import make_channel
    from services.running import members_of
    from services.security import cluster_key

    key, found = cluster_key(running.cluster_key), list[router_pb2.Explanation]()
    for router in await members_of(running, "router"):
        async with make_channel(router.grpc_address, key) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            try:
                reply = await stub.Explain(router_pb2.ExplainRequest(request=request), timeout=_SECONDS)
            except grpc.aio.AioRpcError:  # it has just died: others may know
                continue
            found += reply.placements
    if not found:
        raise ConfigError(
            f"no router remembers {request!r}. Give the `id` of a response; each router keeps its latest 512 placements"
            if request
            else "no request has been placed yet"
        )
    found.sort(key=lambda each: -each.seconds_ago)
    return found if request else found[-1:]


def _show(each: "router_pb2.Explanation", console: "Console") -> None:
    from rich.table import Table

    held = f" after {each.held_seconds:.3f} s in the queue" if each.held_seconds else ""
    console.print(f"{each.attempt}: {each.prompt_tokens} prompt tokens, placed {each.seconds_ago:.1f} s ago{held}")
    console.print(f"  {each.reason}", highlight=False)
    predicted = f"{each.ttft_seconds:.3g} s to the first token, {1e3 * each.tpot_seconds:.3g} ms for each after it"
    console.print(f"  predicted: {predicted}", highlight=False)
    for left_out in each.left_out:
        console.print(f"  not {left_out.name}: {left_out.reason}", highlight=False)
    for ranking in each.rankings:
        title = f"{ranking.role}: the best {len(ranking.best)} of {ranking.candidates}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("worker")
        for name in ("cost", "cached", "expected", "fetchable", "queued", "kept", "requests", "waiting"):
            table.add_column(name, justify="right")
        for number, worker in enumerate(ranking.best):
            counts = (
                worker.cached_tokens,
                worker.expected_tokens,
                worker.fetchable_tokens,
                round(worker.queued_tokens),
                round(worker.kept_tokens),
                worker.requests,
                worker.waiting_for_blocks,
            )
            table.add_row("" if number else "→", worker.name, f"{worker.cost:.6g}", *map(str, counts))
        console.print(table)
