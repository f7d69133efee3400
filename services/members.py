"""`tandem status`, `drain`, `undrain` and `flip`: who is in a cluster, workers taken out of it, and their roles.

They ask the admin port of a gateway, at `/admin/status`, `/admin/drain`, `/admin/undrain` and `/admin/role`, with these
answers.
"""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from services.told import told

if TYPE_CHECKING:
    from rich.console import Group

    from services.admin_client import AdminClient

_POLL_SECONDS = 0.2
FLIP_SECONDS = 60.0  # in which what is under way of the old role is seen out, beyond the time that streams have


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the cluster, as it said of itself half a second ago at most."""

    name: str
    role: str
    state: str  # ready, draining or asleep
    host: str
    pid: int
    incarnation: str
    running: int | None  # requests computed; None: no worker
    waiting: int | None
    model: str = ""  # of workers, as what follows
    gpu: str = ""  # name of the card; empty: CPU
    gpus: int = 0  # tensor-parallel degree
    kv_tokens: int = 0  # that the cache holds


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster, as the gateway that was asked sees it."""

    models: dict[str, bool]  # that workers have; whether a request for it could run now
    connected: bool  # whether the cluster state answers
    members: list[MemberView]


class Drained(msgspec.Struct, frozen=True):
    """What a worker answered."""

    name: str
    under_way: int | None = None  # requests and transfers
    error: str = ""


class Flipped(msgspec.Struct, frozen=True):
    """A worker that has the role that it was asked to take."""

    name: str
    before: str
    role: str
    seconds: float  # until nothing of the old role was under way
    moved: int  # streams that went on at other workers


class _Answers(msgspec.Struct):
    workers: list[Drained]


Workers = Annotated[list[str] | None, typer.Argument(metavar="[WORKER]...", help="Names, such as decode-0.")]
All = Annotated[bool, typer.Option("--all", help="All workers.")]
Admin = Annotated[str, typer.Option(help="Address of the admin port; default: that of the cluster here.")]
AdminKey = Annotated[str, typer.Option(envvar="TANDEM_ADMIN_KEY", help="Key of the admin port.")]
Url = Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")]


def status(
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    admin: Admin = "",
    admin_key: AdminKey = "",
    url: Url = "",
) -> None:
    """Show the processes of a running cluster, and which of them take requests.

    Example:

      tandem status
    """
    from rich.console import Console

    with told():
        text = _client(admin, admin_key, url).ask("GET", "/admin/status")
    if json:
        print(text.decode())
    else:
        Console(highlight=False).print(_picture(msgspec.json.decode(text, type=Status)))


def drain(
    workers: Workers = None,
    all_workers: All = False,
    leave: Annotated[bool, typer.Option("--leave", help="Then have them end, as on SIGTERM.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for what is under way.")] = 600.0,
    admin: Admin = "",
    admin_key: AdminKey = "",
    url: Url = "",
) -> None:
    """Have workers take nothing new, and wait until what they have under way is done.

    With --leave they end then, or after --timeout; streams that are not done go on at other workers. What runs the
    processes starts them again: `tandem up`, Compose and Kubernetes do.

    Examples:

      tandem drain decode-0

      tandem drain decode-0 --leave --timeout 60
    """
    with told():
        client, whom = _client(admin, admin_key, url), _whom(workers, all_workers)
        deadline = time.monotonic() + timeout
        left = _ask(client, "/admin/drain", workers=whom)
        while any(each.under_way for each in left) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = _ask(client, "/admin/drain", workers=whom)
        if leave:
            _ask(client, "/admin/drain", workers=whom, leave=True)
    for each in left:
        what = f"{each.under_way} under way" if each.under_way else "drained"
        print(f"{each.name}: {what}{', leaves' if leave else ''}")
    if any(each.under_way for each in left) and not leave:
        sys.exit(1)


def undrain(
    workers: Workers = None, all_workers: All = False, admin: Admin = "", admin_key: AdminKey = "", url: Url = ""
) -> None:
    """Have drained workers take requests again.

    Example:

      tandem undrain decode-0
    """
    with told():
        answers = _ask(_client(admin, admin_key, url), "/admin/undrain", workers=_whom(workers, all_workers))
    for each in answers:
        print(f"{each.name}: takes requests")


def flip(
    worker: Annotated[str, typer.Argument(help="Its name, such as decode-0.")],
    role: Annotated[Literal["prefill", "decode", "aggregated"], typer.Argument(help="What it is to be.")],
    finish: Annotated[float, typer.Option(help="Seconds that its streams have to finish before they move.")] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Also the last worker that decodes.")] = False,
    admin: Admin = "",
    admin_key: AdminKey = "",
    url: Url = "",
) -> None:
    """Give a running worker another role: it keeps its weights and what it has cached, and is never out.

    It gets work of the new role at once. Streams that it still decodes finish, or go on at other workers; prompts that
    it computes for others are seen out. A worker that is started again has the role that it was started with.

    Example:

      tandem flip decode-1 prefill
    """
    with told():
        asked = {"worker": worker, "role": role, "finish_seconds": finish, "force": force}
        client = _client(admin, admin_key, url)
        text = client.ask("POST", "/admin/role", msgspec.json.encode(asked), finish + FLIP_SECONDS + 5.0)
        done = msgspec.json.decode(text, type=Flipped)
    if done.before == done.role:
        print(f"{done.name}: {done.role} already")
    else:
        streams = f", {done.moved} stream{'s' * (done.moved != 1)} moved" if done.moved else ""
        print(f"{done.name}: {done.before} to {done.role} in {done.seconds:.2f} s{streams}")


def _picture(found: Status) -> "Group":
    from rich.console import Group
    from rich.table import Table

    table = Table("name", "role", "state", "running", "waiting", "host", "pid", box=None, pad_edge=False)
    for view in found.members:
        counts = ("" if view.running is None else str(view.running), "" if view.waiting is None else str(view.waiting))
        table.add_row(view.name, view.role, view.state, *counts, view.host, str(view.pid))
    lost = [] if found.connected else ["the cluster state is lost, and this is what was known"]
    models = [f"{model}: {'ready' if ready else 'no request could run'}" for model, ready in found.models.items()]
    return Group(table, *(models or ["no model yet"]), *lost)


def _whom(names: list[str] | None, all_workers: bool) -> list[str] | str:
    if bool(names) == all_workers:
        _fail("name workers, as `tandem status` shows them, or give --all")
    return "all" if all_workers else names or []


def _client(admin: str, key: str, url: str) -> "AdminClient":
    from services.admin_client import AdminClient
    from services.running import find

    return AdminClient(admin or find(url).admin, key)


def _ask(client: "AdminClient", path: str, **fields: object) -> list[Drained]:
    """Answers of all workers; the command ends if one refuses."""
    answers = msgspec.json.decode(client.ask("POST", path, msgspec.json.encode(fields)), type=_Answers).workers
    if refused := [each for each in answers if each.error]:
        _fail("; ".join(f"{each.name} refuses: {each.error}" for each in refused))
    return answers


def _fail(message: str) -> None:
    from services.config import ConfigError

    raise ConfigError(message)
