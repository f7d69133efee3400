"""How a run goes, while it goes."""

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from bench.load.coordinator import LiveState

_EVERY = 5.0  # seconds between lines where there is no terminal
_REFRESHES = 4  # a second


class LiveView:
    """A table that is redrawn on a terminal, else a line every 5 s. `total` requests or `seconds` bound the run."""

    def __init__(self, console: Console, title: str, total: int | None, seconds: float | None) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._seconds = seconds
        self._told = 0.0  # elapsed, at the last line
        self._progress = Progress(TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn())
        self._task = self._progress.add_task(title, total=total if total is not None else seconds)
        self._live = Live(self._drawn(LiveState()), console=console, refresh_per_second=_REFRESHES, transient=True)

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(self._title, highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, state: LiveState) -> None:
        """Shows the state."""
        if self._console.is_terminal:
            done = state.done if self._total is not None else min(state.elapsed, self._seconds or state.elapsed)
            self._progress.update(self._task, completed=done)
            self._live.update(self._drawn(state))
        elif state.elapsed - self._told >= _EVERY:
            self._told = state.elapsed
            cells = ", ".join(f"{name} {value}" for name, value in _cells(state))
            self._console.print(f"  {state.elapsed:.0f} s: {cells}", highlight=False, soft_wrap=True)

    def _drawn(self, state: LiveState) -> Group:
        table = Table.grid(padding=(0, 3))
        cells = _cells(state)
        table.add_row(*(f"[dim]{name}[/dim]" for name, _ in cells))
        table.add_row(*(f"[bold]{value}[/bold]" for _, value in cells))
        return Group(self._progress, table)


def _cells(state: LiveState) -> list[tuple[str, str]]:
    errors = ", ".join(f"{count} {kind}" for kind, count in sorted(state.errors.items()))
    return [
        ("sent", str(state.sent)),
        ("done", str(state.done)),
        ("in flight", str(state.in_flight)),
        ("requests/s", f"{state.request_rate:.2f}"),
        ("tokens/s", f"{state.output_rate:.0f}"),
        ("TTFT p50/p90", _pair(state.ttft_p50, state.ttft_p90)),
        ("TPOT p50/p90", _pair(state.tpot_p50, state.tpot_p90)),
        ("errors", errors or "0"),
    ]


def _pair(middle: float | None, high: float | None) -> str:
    return "-" if middle is None or high is None else f"{middle:.1f}/{high:.1f} ms"
