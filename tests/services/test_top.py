"""What `tandem top` prints fits into a terminal of 80 columns."""

from rich.console import Console

from services.live import WorkerView
from services.top import _workers


def view(name: str, role: str, model: str) -> WorkerView:
    return WorkerView(
        name=name,
        role=role,
        incarnation="a",
        host="h",
        model=model,
        state="ready",
        reason="",
        running=12,
        waiting=3,
        waiting_for_blocks=0,
        blocks=100,
        free_blocks=0,
        generated_per_second=1234.5,
        computed_per_second=12.0,
        hit_rate=1.0,
        hits=[],
    )


def test_workers_of_a_model_fit_into_80_columns() -> None:
    model = "Qwen/Qwen3-0.6B[bold]"
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_workers([view(f"{role}-0", role, model) for role in ("prefill", "aggregated")], model))
    title, _, *rows = captured.get().splitlines()
    assert title.strip() == model and len(rows) == 2 and all("100 %" in row for row in rows)
