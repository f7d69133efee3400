"""`tandem plan explain`: what the planner of a running cluster decided, and why."""

import functools
import inspect
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from bench.plan import plan
from services.told import told

if TYPE_CHECKING:
    from rich.console import Group

    from planner.decision import Decision

app = typer.Typer(rich_markup_mode="markdown")


@functools.wraps(plan)
def _plan(context: typer.Context, **given: Any) -> None:
    if context.invoked_subcommand is None:
        plan(**given)


_context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
_plan.__signature__ = inspect.Signature([_context, *inspect.signature(plan).parameters.values()])  # type: ignore[attr-defined]
_plan.__annotations__ = {"context": typer.Context, **plan.__annotations__}
app.callback(invoke_without_command=True)(_plan)


@app.command()
def explain(
    last: Annotated[int, typer.Option(help="So many decisions, the latest last.", min=1, max=1000)] = 1,
    model: Annotated[str, typer.Option(help="Of this model; none: of all.")] = "",
    json: Annotated[bool, typer.Option("--json", help="JSON lines instead of text.")] = False,
    admin: Annotated[str, typer.Option(help="Address of the admin port; default: that of the cluster here.")] = "",
    admin_key: Annotated[str, typer.Option(envvar="TANDEM_ADMIN_KEY", help="Key of the admin port.")] = "",
    url: Annotated[str, typer.Option(help="HTTP address of the cluster, where `tandem up` runs several.")] = "",
) -> None:
    """Show what the planner of a running cluster measured and forecast, what it weighed, what it chose and what came of
    it.

    Examples:

      tandem plan explain

      tandem plan explain --last 20 --json
    """
    from rich.console import Console

    from planner.decision import from_line
    from services.admin_client import AdminClient
    from services.config import ConfigError
    from services.running import find

    with told():
        text = AdminClient(admin or find(url).admin, admin_key).ask("GET", f"/admin/planner?last={last}")
        found: dict[str, list[msgspec.Raw]] = msgspec.json.decode(text, type=dict[str, list[msgspec.Raw]])
        lines = [bytes(line).strip() for name, of in found.items() if model in ("", name) for line in of]
        if not lines:
            raise ConfigError("there is no decision yet: is there a planner (`tandem up --planner advise`)?")
    for line in lines:
        if json:
            print(line.decode())
        else:
            Console(highlight=False).print(_picture(from_line(line)))


def _picture(decision: "Decision") -> "Group":
    from datetime import datetime

    from rich.console import Group
    from rich.table import Table

    window, ahead = decision.window, decision.forecast
    at = datetime.fromtimestamp(decision.at).isoformat(" ", "seconds")
    facts = Table("", "measured", "forecast", "at most", box=None, pad_edge=False)
    rows = [
        ("requests/s", window.rate, ahead.arrivals.mean, ahead.arrivals.upper),
        ("prompt tokens", window.prompt_tokens, ahead.prompt_tokens.mean, ahead.prompt_tokens.upper),
        ("output tokens", window.output_tokens, ahead.output_tokens.mean, ahead.output_tokens.upper),
        ("TTFT, s", window.ttft, math.nan, math.nan),
        ("TPOT, s", window.tpot, math.nan, math.nan),
        ("kept to objectives", window.attained, math.nan, math.nan),
        ("waiting", window.queued, math.nan, math.nan),
    ]
    for name, *values in rows:
        facts.add_row(name, *(_number(value) for value in values))
    options = Table("workers", "TTFT kept", "TPOT kept", "both", "GPUs", "note", box=None, pad_edge=False)
    for option in decision.options:
        shares = (option.ttft_attainment, option.tpot_attainment, option.attainment)
        mark = "* " if option == decision.chosen else "  "
        options.add_row(f"{mark}{option}", *map(_share, shares), str(option.gpus), option.note)
    what = "; ".join(map(str, decision.actions)) or "nothing"
    lines = [f"{decision.model} #{decision.number} at {at} ({decision.mode}): {what}", f"because {decision.reason}"]
    if decision.shed:
        lines.append(f"shed: {100 * decision.shed:.0f} % of the requests, those of the highest priority numbers first")
    if decision.held:
        lines.append(f"held: {decision.held}")
    if (outcome := decision.outcome) is not None and decision.mode == "act" and decision.actions:
        lines += [f"done: {outcome.done} of {len(decision.actions)}", *outcome.failed]
    if outcome is not None and not math.isnan(outcome.attained):
        lines.append(f"then {_share(outcome.attained)} kept to the objectives, in the window after it")
    return Group(*lines, facts, options, "")


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"
