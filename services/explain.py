"""`tandem router`: why requests went where they went, and what routers know."""

import asyncio
import contextlib
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from google.protobuf.message import Message
    from rich.console import Console

    from services.rpc import router_pb2
    from services.rpc.router_pb2_grpc import RouterStub
    from services.running import RunningCluster

T = TypeVar("T")
app = typer.Typer(
    no_args_is_help=True, help="Why requests went where they went, and what routers know.", rich_markup_mode="markdown"
)
_SECONDS = 3.0


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="The `id` of a response; none: the latest placement.")] = "",
    json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    url: Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")] = "",
) -> None:
    """Show what the router knew of the best candidates for a request, their costs, and which one it took.

    The least **cost** wins, or one that is as good; what it counts depends on the policy. **cached** tokens of the
    prompt are there, **expected** ones also by requests under way, **fetchable** ones on another worker. **queued** are
    tokens of other prompts to compute, **kept** those of answers under way, **waiting** requests have no KV blocks yet.
    **not** names workers that could not be taken, such as those whose circuit breaker is open.

    Each router keeps its latest 512 placements.

    Examples:

      tandem router explain

      tandem router explain cmpl-0123456789abcdef --json
    """
    from rich.console import Console

    found = _told(lambda running: _gather(running, request), url)
    if json:
        _print_json([_fields(each) for each in found])
        return
    console = Console()
    for each in found:
        _show(each, console)


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    url: Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")] = "",
) -> None:
    """Show what each router knows, and whether its placements go by what workers have cached.

    **mode** is `prefix`, or `load_only` with the reason. **precision** is the part of the cached tokens predicted
    lately that were found, **recall** the part of those found that were predicted. Workers' caches are **known**, not
    known yet, **silent** or **refused**, as they hash blocks otherwise. **stale** are the seconds since another router
    was heard. Below, the workers of each model, and requests that wait until one of them has room.
    """
    from rich.console import Console
    from rich.table import Table

    found = _told(_statuses, url)
    if json:
        _print_json([{"name": name} | _fields(each) for name, each in found])
        return
    names = ("router", "policy", "mode", "precision", "recall", "workers", "blocks", "under way", "stale")
    table = Table(*names, box=None, pad_edge=False)
    for name, each in found:
        caches = ", ".join(f"{count} {state}" for state, count in sorted(each.caches.items()) if count)
        reuse = (_share(each.precision), _share(each.recall))
        load = (str(each.blocks), str(each.reservations), f"{each.staleness_seconds:.1f} s" if each.routers else "-")
        table.add_row(name, each.policy, each.mode, *reuse, caches or "none", *load)
    console = Console()
    console.print(table)
    for name, each in found:
        for model in each.models:
            workers = ", ".join(f"{count} {role}" for role, count in sorted(model.workers.items()))
            queued = f", {model.queued} requests wait" if model.queued else ""
            shed = f", {_share(model.shed)} of its requests are refused for the planner" if model.shed else ""
            console.print(f"{name}: model {model.name}: {workers or 'no workers'}{queued}{shed}", highlight=False)
        if each.reason:
            console.print(f"{name}: load only, as {each.reason}", highlight=False)


def _told(ask: "Callable[[RunningCluster], Coroutine[Any, Any, list[T]]]", url: str) -> list[T]:
    """What a command's cluster answers; else the command ends, saying why."""
    from services.config import ConfigError
    from services.running import of_command
    from services.supervisor import EXIT_CONFIGURATION

    try:
        return asyncio.run(ask(of_command(url)))
    except (ConfigError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)


def _print_json(found: list[dict[str, Any]]) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())


def _fields(message: "Message") -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _share(part: float) -> str:
    return "-" if math.isnan(part) else f"{100 * part:.0f} %"


async def _statuses(running: "RunningCluster") -> "list[tuple[str, router_pb2.StatusReply]]":
    """By routers' names. Raises ConfigError if none answers."""
    from services.config import ConfigError
    from services.rpc import router_pb2

    found = await _ask_all(running, lambda router: router.Status(router_pb2.StatusRequest(), timeout=_SECONDS))
    if not found:
        raise ConfigError("no router answers")
    return sorted(found, key=lambda each: each[0])


async def _gather(running: "RunningCluster", request: str) -> "list[router_pb2.Explanation]":
    """Placements by all routers, oldest first. Raises ConfigError if there are none."""
    from services.config import ConfigError
    from services.rpc import router_pb2

    asked = router_pb2.ExplainRequest(request=request)
    replies = await _ask_all(running, lambda router: router.Explain(asked, timeout=_SECONDS))
    found = [each for _, reply in replies for each in reply.placements]
    if not found:
        raise ConfigError(
            f"no router remembers {request!r}. Give the `id` of a response; each router keeps its latest 512 placements"
            if request
            else "no request has been placed yet"
        )
    found.sort(key=lambda each: -each.seconds_ago)
    return found if request else found[-1:]


async def _ask_all(running: "RunningCluster", call: "Callable[[RouterStub], Awaitable[T]]") -> list[tuple[str, T]]:
    """Answers of the routers, by name; those that have just died give none."""
    import grpc

    from services.rpc import router_pb2_grpc
    from services.rpc_server import make_channel
    from services.running import members_of
    from services.security import key_of

    found, key = [], key_of(running)
    for router in await members_of(running, "router"):
        async with make_channel(router.grpc_address, key) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                found.append((router.name, await call(router_pb2_grpc.RouterStub(channel))))
    return found


def _show(each: "router_pb2.Explanation", console: "Console") -> None:
    from rich.table import Table

    held = f" after {each.held_seconds:.3f} s in the queue" if each.held_seconds else ""
    when = f"placed {each.seconds_ago:.1f} s ago{held}"
    console.print(f"{each.attempt}: {each.prompt_tokens} prompt tokens for {each.model}, {when}")
    console.print(f"  {each.reason}", highlight=False)
    if each.HasField("found_tokens"):
        console.print(f"  {each.predicted_tokens} tokens predicted to be cached, {each.found_tokens} found")
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
