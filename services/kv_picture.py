"""A KV transfer as a picture for the terminal: a row for each thing that happened, with a bar on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.kv_trace import Event, Push, Trace

_MOST_LAYERS = 40  # more pushes than that are shown by chunks
_COMPUTE, _PUSH, _WAIT = "░", "█", "─"
_BAD = ("recomputed", "aborted", "stopping")


@dataclass(slots=True)
class _Row:
    worker: str
    event: str
    detail: str = ""
    pushes: list[Push] = field(default_factory=list)
    strokes: list[tuple[float, float, str]] = field(default_factory=list)  # parts of the bar: from, to, character

    @property
    def end(self) -> float:
        """ms."""
        return self.strokes[-1][1]


def show(trace: Trace, console: Console) -> None:
    """Prints one transfer."""
    rows = _rows(trace)
    until = max(row.end for row in rows) or 1.0
    width = max(20, min(60, console.width - 68))
    sides = f"{trace.prefill or '(gone)'} → {trace.decode or '(gone)'}"
    moved = f"{_size(trace.bytes)} over {trace.connector}" if trace.connector else "no KV moved"
    table = Table(title=f"{trace.transfer}\n{sides}, {moved}", title_justify="left", box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    for name in ("worker", "event", ""):
        table.add_column(name, overflow="fold")
    table.add_column("0" + f"{until:.1f} ms".rjust(width - 1), no_wrap=True)
    for row in rows:
        style = "red" if row.event in _BAD else "green" if row.event == "committed" else ""
        bar = Text(_bar(row, until, width), style=style or ("cyan" if row.worker == trace.prefill else "blue"))
        table.add_row(f"{row.end:.2f}", row.worker, Text(row.event, style=style), Text(row.detail), bar)
    console.print(table)
    if trace.exposed_ms is not None:
        console.print(f"exposed: {trace.exposed_ms:.2f} ms from the last layer computed to the commit")
    if trace.clock_error_ms:
        console.print(f"two clocks, matched within ±{trace.clock_error_ms:.2f} ms")
    if trace.pushes_left_out:
        console.print(f"{trace.pushes_left_out} later pushes were not kept")


def _rows(trace: Trace) -> list[_Row]:
    """In order of their ends. A bar begins where the one before on the same worker ended."""
    rows = list[_Row]()
    groups = dict[tuple[int, int], _Row]()
    last = dict[str, float]()
    points: list[Event | Push] = [*trace.events, *trace.pushes]
    for point in sorted(points, key=_end):
        if isinstance(point, Event):
            row = _Row(point.worker, point.event, point.detail)
            row.strokes.append((last.get(point.worker, point.ms), point.ms, _WAIT))
            rows.append(row)
        else:
            layer = point.layer if len(trace.pushes) <= _MOST_LAYERS else -1
            group = groups.get((point.tokens, layer))
            if group is None:
                of_layer = "" if layer < 0 else f"{_named(point)}, "
                group = groups[point.tokens, layer] = _Row(trace.prefill, f"{of_layer}to token {point.tokens}")
                rows.append(group)
            group.pushes.append(point)
            before = last.get(trace.prefill, point.ms)
            group.strokes += [(before, point.ms, _COMPUTE), (point.ms, _end(point), _PUSH)]
            group.detail = _moved(group.pushes)
            row = group
        last[row.worker] = row.end
    return sorted(rows, key=lambda row: row.end)


def _end(point: Event | Push) -> float:
    return point.ms if isinstance(point, Event) else point.ms + point.push_ms


def _named(push: Push) -> str:
    return f"layer {push.layer}" if push.layers == 1 else f"layers {push.layer} to {push.layer + push.layers - 1}"


def _moved(pushes: list[Push]) -> str:
    layers = f"{sum(push.layers for push in pushes)} layers, " if len(pushes) > 1 else ""
    return f"{layers}{_size(sum(push.bytes for push in pushes))}, {sum(push.push_ms for push in pushes):.2f} ms"


def _bar(row: _Row, until: float, width: int) -> str:
    """Each cell shows what took most of its time; the shortest row has a cell, too."""
    cells = [defaultdict[str, float](float) for _ in range(width)]
    for start, end, character in row.strokes:
        for cell in range(min(width - 1, int(start / until * width)), min(width, int(end / until * width) + 1)):
            from_, to = cell * until / width, (cell + 1) * until / width
            cells[cell][character] += max(min(end, to) - max(start, from_), 1e-9)
    return "".join(max(cell, key=cell.__getitem__) if cell else " " for cell in cells)


def _size(num_bytes: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >> bits:
            return f"{num_bytes / 2.0**bits:.1f} {unit}"
    return f"{num_bytes} B"
