"""`tandem cache`: what the KV service keeps, and what people can do about it."""

from __future__ import annotations

import asyncio
import hashlib
import json as json_module
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from services.told import told

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import grpc.aio

    from services.rpc import cluster_pb2
    from services.running import RunningCluster

T = TypeVar("T")
app = typer.Typer(
    no_args_is_help=True,
    help="What the KV service keeps of prompts; `tandem up --kv-memory-host 4GiB` starts one.",
    rich_markup_mode="markdown",
)
_SECONDS = 5.0
_ALL_SECONDS = 3600.0  # for all blocks of all tiers
_PIN_SECONDS = 600  # until what a request pins is made to last
_WARM_SECONDS = 1  # of a pin for what it does beside: what only workers have is copied
_COUNTERS = ("hit_blocks", "stored_blocks", "evicted_blocks")
_GAUGES = ("blocks", "bytes", "capacity_bytes")

Url = Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")]
Model = Annotated[str, typer.Option(help="Model name; default: the first that is served.")]
ApiKey = Annotated[str, typer.Option(envvar="TANDEM_API_KEY", help="Key of the gateway.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


@app.command()
def show(
    top: Annotated[int, typer.Option(help="How many of the prefixes that were asked for most.", min=0, max=1000)] = 10,
    json: Json = False,
    url: Url = "",
) -> None:
    """Show each tier of the KV service: what it holds, what fits, and what came of what it was asked for.

    Blocks that **hit** were asked for by a worker and found there, **missed** ones were in no tier, **waiting** ones
    are still to be copied from workers. Prefixes are told by the hash of their last block; prompts are not known there.
    **Pinned** blocks are not given up: those of sessions that ask for it (`X-Tandem-Pin`), and what `pin` was given.

    Examples:

      tandem cache show

      tandem cache show --top 3 --json
    """
    found, _ = _each(url, lambda running, member: _state(running, member, top))
    if json:
        print(json_module.dumps(found, indent=1))
        return
    for each in found:
        _print(each)


@app.command()
def verify(url: Url = "") -> None:
    """Read all blocks beneath host memory and compare them with their checksums; those that are wrong are removed.

    Blocks in host memory are compared each time that they are sent. Ends with 1 if any was wrong or could not be read,
    or a KV service failed.

    Example:

      tandem cache verify
    """
    from services.rpc import tiers_pb2, tiers_pb2_grpc

    async def ask(channel: grpc.aio.Channel) -> tuple[int, int]:
        reply = await tiers_pb2_grpc.TiersStub(channel).Verify(tiers_pb2.VerifyRequest(), timeout=_ALL_SECONDS)
        return reply.right, reply.wrong

    found, failed = _each(url, lambda running, member: _call(running, member, ask))
    right, wrong = (sum(each[at] for each in found) for at in (0, 1))
    print(f"{right} blocks are right, {wrong} were wrong or could not be read")
    if wrong or failed:
        sys.exit(1)


@app.command()
def drop(url: Url = "") -> None:
    """Forget all blocks of all tiers, also for after a restart. Workers' own caches stay as they are.

    Ends with 1 if a KV service failed: what it keeps may be there still.

    Example:

      tandem cache drop
    """
    from services.rpc import tiers_pb2, tiers_pb2_grpc

    async def ask(channel: grpc.aio.Channel) -> int:
        reply = await tiers_pb2_grpc.TiersStub(channel).Drop(tiers_pb2.DropRequest(), timeout=_ALL_SECONDS)
        return int(reply.blocks)

    found, failed = _each(url, lambda running, member: _call(running, member, ask))
    print(f"{sum(found)} blocks are forgotten")
    if failed:
        sys.exit(1)


@app.command()
def warm(
    prompts: Annotated[Path, typer.Argument(help="A prompt a line.", exists=True, dir_okay=False)],
    model: Model = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait until all is copied.", min=0)] = 60.0,
    api_key: ApiKey = "",
    url: Url = "",
) -> None:
    """Have prompts computed, one after the other, and kept: requests that begin as they do find them.

    A line is what a user says; or, in braces, the body of a request in JSON with `messages`, for a system prompt, or
    `prompt`; `model` in it goes before --model. Each is asked for one token, with the tenant's key: other tenants find
    nothing of it.

    Example:

      tandem cache warm prompts.txt
    """
    _each(url, lambda running, member: _state(running, member, 0))
    count = sum(1 for _ in _compute(prompts, model, api_key, url))
    ends = time.monotonic() + wait
    while True:
        time.sleep(1.0)  # events of the last prompt are on their way
        members, _ = _each(url, lambda running, member: _state(running, member, 0))
        waiting = sum(each["waiting_blocks"] for each in members)
        if not waiting or time.monotonic() >= ends:
            break
    kept = sum(tier["blocks"] for each in members for tier in each["tiers"].values())
    print(f"{count} prompts computed; {kept:.0f} blocks in all tiers" + (f", {waiting:.0f} to come" if waiting else ""))


@app.command()
def pin(
    prompts: Annotated[Path, typer.Argument(help="A prompt a line, as for `warm`.", exists=True, dir_okay=False)],
    model: Model = "",
    api_key: ApiKey = "",
    url: Url = "",
) -> None:
    """Have prompts computed, as `warm` does, and never given up, until `unpin` or until the KV service starts anew.

    What is pinned is whole KV blocks of the prompt, within the share of host memory that `kv_pin_share` allows; the
    disk keeps it, too. Ends with 1 if some prompt does not fit: as much of its beginning as did is pinned then.

    Example:

      tandem cache pin system-prompts.txt
    """
    from services.rpc import tiers_pb2, tiers_pb2_grpc

    _each(url, lambda running, member: _state(running, member, 0))
    failed = 0
    for where, name, answer in _compute(prompts, model, api_key, url, pinned=True):
        pinned = dict(each.strip().partition("=")[::2] for each in answer.split(","))

        async def ask(channel: grpc.aio.Channel, names: tuple[str, str] = (pinned.get("name", ""), name)) -> bool:
            request = tiers_pb2.KeepPinRequest(name=names[0], lasting=names[1])
            reply = await tiers_pb2_grpc.TiersStub(channel).KeepPin(request, timeout=_SECONDS)
            return bool(reply.found)

        kept = int(pinned.get("blocks", "0")) > 0 and any(
            _each(url, lambda running, member, ask=ask: _call(running, member, ask))[0]  # type: ignore[misc]
        )
        if not kept or "limit" in pinned:
            failed += 1
            print(f"error: {where}: {_why_not(pinned)}", file=sys.stderr)
        if kept:
            print(f"{name}: {pinned['blocks']} blocks")
    if failed:
        sys.exit(1)


@app.command()
def unpin(
    prompts: Annotated[
        Path | None, typer.Argument(help="The prompts, as they were pinned.", exists=True, dir_okay=False)
    ] = None,
    name: Annotated[list[str] | None, typer.Option(help="A pin as `tandem cache show` names it.")] = None,
    all: Annotated[bool, typer.Option("--all", help="All that `pin` has pinned.")] = False,
    model: Model = "",
    api_key: ApiKey = "",
    url: Url = "",
) -> None:
    """End what `pin` does: the blocks stay until others need their room.

    Examples:

      tandem cache unpin system-prompts.txt

      tandem cache unpin --all
    """
    from services.chat import ChatFailed, Client
    from services.rpc import tiers_pb2, tiers_pb2_grpc

    if not (prompts or name or all):
        _fail("name what is pinned no more: a file of prompts, --name or --all")
    names = list(name or ())
    if prompts:
        try:
            model = model or Client(_running(url).url, api_key).first_model()
        except ChatFailed as error:
            _fail(str(error))
        names += [_pin_name(line, model, api_key) for _, line in _lines(prompts)]

    async def ask(channel: grpc.aio.Channel) -> int:
        request = tiers_pb2.UnpinRequest(names=names, all=all)
        return int((await tiers_pb2_grpc.TiersStub(channel).Unpin(request, timeout=_SECONDS)).pins)

    found, failed = _each(url, lambda running, member: _call(running, member, ask))
    print(f"{sum(found)} prompts are pinned no more")
    if failed:
        sys.exit(1)


def _compute(
    prompts: Path, model: str, api_key: str, url: str, *, pinned: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Has prompts computed one after the other; of each where it stands, its pin's name, and what came of that."""
    from services.chat import ChatFailed, Client

    try:
        client = Client(_running(url).url, api_key)
        model = model or client.first_model()
        for where, line in _lines(prompts):
            body = {"model": model} | _body(line, where) | {"max_tokens": 1, "stream": False}
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            name = _pin_name(line, model, api_key)
            seconds = _PIN_SECONDS if pinned else _WARM_SECONDS
            response = client.request("POST", path, body, {"X-Session-Id": name, "X-Tandem-Pin": str(seconds)})
            response.read()
            yield where, name, response.headers.get("X-Tandem-Pin", "")
    except ChatFailed as error:
        _fail(str(error))


def _lines(prompts: Path) -> list[tuple[str, str]]:
    """Those that say something, each with where it stands."""
    try:
        text = prompts.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _fail(f"{prompts} is not text in UTF-8: give a prompt a line")
    lines = enumerate(text.split("\n"), 1)  # JSON may hold other line separators
    return [(f"{prompts}, line {number}", line.strip()) for number, line in lines if line.strip()]


def _pin_name(line: str, model: str, api_key: str) -> str:
    """The same each time for one prompt of one tenant's, and tells nothing of it."""
    return "prompt-" + hashlib.sha256("\0".join((api_key, model, line)).encode()).hexdigest()[:24]


def _why_not(pinned: dict[str, str]) -> str:
    match pinned.get("limit"):
        case "all":
            return f"{pinned['blocks']} of its blocks fit beside what is pinned; see `kv_pin_share`, or unpin something"
        case "tenant":
            return f"{pinned['blocks']} of its blocks fit into the tenant's share; see `kv_pin_tenant_share`"
        case "unavailable":
            return "no KV service of the model answers"
        case _:
            return "it does not fill a KV block, or its pin was over before it could last"


def _body(line: str, where: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {"messages": [{"role": "user", "content": line}]}
    try:
        body = json_module.loads(line)
    except (ValueError, RecursionError) as error:
        _fail(f"{where} is no JSON: {error}")
    if not ("messages" in body) ^ ("prompt" in body):
        _fail(f"{where}: give either `messages` or `prompt`")
    return dict(body)


async def _state(running: RunningCluster, member: cluster_pb2.Member, top: int) -> dict[str, Any]:
    """What one KV service tells of itself."""
    from prometheus_client.parser import text_string_to_metric_families

    from services.rpc import cluster_pb2, cluster_pb2_grpc, tiers_pb2, tiers_pb2_grpc

    async def ask(channel: grpc.aio.Channel) -> tuple[str, tiers_pb2.TopReply, tiers_pb2.PinsReply]:
        metrics = await cluster_pb2_grpc.NodeStub(channel).Metrics(cluster_pb2.MetricsRequest(), timeout=_SECONDS)
        prefixes = await tiers_pb2_grpc.TiersStub(channel).Top(tiers_pb2.TopRequest(count=top), timeout=_SECONDS)
        pins = await tiers_pb2_grpc.TiersStub(channel).Pins(tiers_pb2.PinsRequest(), timeout=_SECONDS)
        return bytes(metrics.text).decode(), prefixes, pins

    text, prefixes, pins = await _call(running, member, ask)
    tiers: dict[str, dict[str, float]] = {}
    plain: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("tandem_tier_")
        for sample in family.samples:
            if name in (*_COUNTERS, *_GAUGES) and sample.name in (family.name, family.name + "_total"):
                tier = tiers.setdefault(sample.labels["tier"], dict.fromkeys((*_GAUGES, *_COUNTERS), 0.0))
                tier[name] = sample.value
            elif name in ("missed_blocks", "waiting_blocks") and sample.name in (family.name, family.name + "_total"):
                plain[name] = sample.value
    hits = sum(tier["hit_blocks"] for tier in tiers.values())
    asked = hits + plain["missed_blocks"]
    return {
        "name": member.name,
        "tiers": tiers,
        **plain,
        "hit_rate": hits / asked if asked else None,
        "top": [
            {"hash": each.block_hash.hex(), "tokens": each.tokens, "uses": each.uses} for each in prefixes.prefixes
        ],
        "pinned": {
            "blocks": pins.blocks,
            "blocks_here": pins.here,
            "most_blocks": pins.most,
            "sessions": pins.sessions,
            "prompts": [
                {"name": each.name, "hash": each.block_hash.hex(), "blocks": each.blocks, "blocks_here": each.here}
                for each in pins.lasting
            ],
        },
    }


def _print(state: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    console = Console()
    rate = "nothing was asked for yet" if state["hit_rate"] is None else f"{100 * state['hit_rate']:.1f} % hit"
    table = Table(title=f"{state['name']}: {rate}, {state['missed_blocks']:.0f} blocks missed", title_justify="left")
    for column in ("tier", "blocks", "size", "of", "hit", "stored", "evicted"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in state["tiers"].items():
        counts = [f"{tier[each]:.0f}" for each in _COUNTERS]
        bound = decimal(int(tier["capacity_bytes"])) if tier["capacity_bytes"] else ""  # Redis's and S3's is their own
        table.add_row(name, f"{tier['blocks']:.0f}", decimal(int(tier["bytes"])), bound, *counts)
    console.print(table)
    if state["waiting_blocks"]:
        console.print(f"{state['waiting_blocks']:.0f} blocks waiting to be copied")
    if state["top"]:
        table = Table("last block", "tokens", "uses", title="asked for most", title_justify="left")
        for each in state["top"]:
            table.add_row(each["hash"], str(each["tokens"]), str(each["uses"]))
        console.print(table)
    pinned = state["pinned"]
    if pinned["blocks"]:
        console.print(
            f"pinned: {pinned['blocks']} of at most {pinned['most_blocks']} blocks, {pinned['blocks_here']} in host "
            f"memory; {pinned['sessions']} sessions, {len(pinned['prompts'])} prompts"
        )
    if pinned["prompts"]:
        table = Table(title="pinned until unpinned", title_justify="left")
        # `unpin` takes the name, so it stays whole.
        table.add_column("prompt", no_wrap=True, min_width=max(len(each["name"]) for each in pinned["prompts"]))
        table.add_column("last block", overflow="fold")
        table.add_column("blocks")
        table.add_column("here")
        for each in pinned["prompts"]:
            table.add_row(each["name"], each["hash"], str(each["blocks"]), str(each["blocks_here"]))
        console.print(table)


async def _call(
    running: RunningCluster, member: cluster_pb2.Member, ask: Callable[[grpc.aio.Channel], Awaitable[T]]
) -> T:
    from services.rpc_server import make_channel
    from services.security import key_of

    async with make_channel(member.grpc_address, key_of(running)) as channel:
        return await ask(channel)


def _each(url: str, ask: Callable[[RunningCluster, cluster_pb2.Member], Awaitable[T]]) -> tuple[list[T], int]:
    """What the KV services of the cluster answer, and how many fail. Without any it ends, saying why."""
    import grpc.aio

    from services.config import ConfigError
    from services.running import members_of

    running = _running(url)

    async def ask_all() -> tuple[list[T], int]:
        members = sorted(await members_of(running, "kv"), key=lambda member: member.name)
        if not members:
            raise ConfigError(
                "this cluster has no KV service, or it waits for a worker; `tandem up --kv-memory-host 4GiB` starts one"
            )
        found = []
        for member in members:
            try:
                found.append(await ask(running, member))
            except grpc.aio.AioRpcError as error:  # one that has died stays a member for a while
                print(f"error: {member.name} fails: {error.details() or error.code().name}", file=sys.stderr)
        if not found:
            sys.exit(1)
        return found, len(members) - len(found)

    with told(ConnectionError):
        return asyncio.run(ask_all())


def _running(url: str) -> RunningCluster:
    from services.running import of_command

    with told(ConnectionError):
        return of_command(url)


def _fail(message: str) -> Any:
    from services.supervisor import EXIT_CONFIGURATION

    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_CONFIGURATION)
