"""`tandem top`: what the console shows, in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.live import Live, WorkerView

_BAR = 6  # characters
_STYLES = {"ready": "green", "draining": "yellow", "asleep": "yellow", "out": "red"}


def summary(live: Live) -> Text:
    """The cluster in three lines."""
    traffic = live.traffic
    state = Text("live", "green") if live.connected else Text("cluster state lost", "red")
    return Text("\n").join(
        (
            Text.assemble((models(live), "bold"), f", cluster {live.cluster}, ", state),
            Text(
                f"{traffic.running} under way, {traffic.requests_per_second:.1f} requests/s, "
                f"{traffic.generated_per_second:.1f} tokens/s, {traffic.computed_per_second:.1f} prompt tokens/s, "
                f"KV {size(traffic.kv_bytes_per_second)}/s, cache hits {share(traffic.hit_rate)}"
            ),
            Text(
                f"TTFT p50 {seconds(traffic.ttft.p50)} p95 {seconds(traffic.ttft.p95)}, "
                f"TPOT p50 {seconds(traffic.tpot.p50)} p95 {seconds(traffic.tpot.p95)}, "
                f"objectives kept {share(traffic.attainment)}, "
                f"{traffic.outcomes.get('server_error', 0)} of {traffic.ended} requests failed"
            ),
        )
    )


def models(live: Live) -> str:
    """Names of the models; with its state what is not ready."""
    return ", ".join(each.name if each.state == "ready" else f"{each.name} ({each.state})" for each in live.models)


def tables(live: Live) -> list[Table]:
    """Workers, links and routers."""
    names = dict.fromkeys(view.model for view in live.workers)
    several = len(live.models) > 1  # a table for each then: with one column more it would not fit into 80
    workers = [_workers([v for v in live.workers if v.model == name], name if several else "") for name in names]
    links = _table("link", "connector", ">KV/s", ">moved", ">transfers")
    for link in live.links:
        ends = Text(f"{link.source_name or link.source[:8]} → {link.target_name}")
        rate = f"{size(link.bytes_per_second)}/s"
        links.add_row(ends, link.connector, rate, size(link.bytes), str(link.transfers))
    routers = _table("router", "policy", "mode", ">queued", ">under way", ">precision", ">recall")
    for each in live.routers:
        policy = each.policy or "does not answer"
        check = share(each.precision), share(each.recall)
        routers.add_row(Text(each.name), policy, each.mode, str(each.queued), str(each.under_way), *check)
    return [*workers, links, routers]


def _workers(views: list[WorkerView], title: str) -> Table:
    table = _table("worker", "role", "state", ">running", ">waiting", "KV in use", ">tokens/s", ">hits")
    table.title, table.title_justify = Text(title, "bold") if title else None, "left"
    for view in views:
        state = (
            Text(view.state, _STYLES[view.state]) if not view.reason else Text(f"{view.state}: {view.reason}", "red")
        )
        rate = f"{view.generated_per_second + view.computed_per_second:.1f}"
        counts = str(view.running), str(view.waiting)
        table.add_row(Text(view.name), Text(view.role), state, *counts, _in_use(view), rate, share(view.hit_rate))
    return table


def picture(live: Live) -> Group:
    """All of it."""
    parts: list[RenderableType] = [summary(live)]
    for table in tables(live):
        parts += [Text(), table]
    return Group(*parts)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left")
    return table


def _in_use(view: WorkerView) -> Text:
    used = 1 - view.free_blocks / view.blocks if view.blocks else 0.0
    full = round(_BAR * used)
    return Text.assemble(("█" * full, "cyan"), ("░" * (_BAR - full), "dim"), f" {100 * used:3.0f} %")


def seconds(value: float | None) -> str:
    """For people."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def share(value: float | None) -> str:
    """For people."""
    return "-" if value is None else f"{100 * value:.0f} %"


def size(num_bytes: float) -> str:
    """For people, with units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
