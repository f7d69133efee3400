"""What the planner decided, from what, and why: one JSON line a decision, which can be read back."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from planner.forecast import Forecast
from planner.window import NAN, Role, Window

Mode = Literal["off", "advise", "act"]


class Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to do. They are done in their order; cheapest first, and what frees GPUs before what takes some."""

    kind: Literal["flip", "add", "remove", "shed"]
    role: Role | None = None  # that a worker flips to, is added in, or is removed from
    worker: str = ""  # its name, of flip and remove
    before: Role | None = None  # role that a worker flips from
    gpus: int = 1  # of the worker; of add: its tensor-parallel degree
    share: float = 0.0  # of shed: part of the arrivals that the router should refuse; 0: none any more

    def __str__(self) -> str:
        match self.kind:
            case "flip":
                return f"flip {self.worker} from {self.before} to {self.role}"
            case "remove":
                return f"remove {self.worker} ({self.role})"
            case "add":
                return f"add one {self.role} worker" + (f" on {self.gpus} GPUs" if self.gpus > 1 else "")
        return f"shed {100 * self.share:.0f} % of the arrivals" if self.share else "shed nothing any more"


class Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment that was weighed, with what is predicted of it under the forecast's upper band."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    tensor_parallel: int = 1  # GPUs of each worker
    ttft_attainment: float = NAN  # share of the requests
    tpot_attainment: float = NAN
    attainment: float = NAN  # both
    gpus: int = 0
    note: str = ""  # such as "as it is", or why it was not taken

    def count(self, role: Role) -> int:
        """Workers of a role."""
        return int(getattr(self, role))

    def __str__(self) -> str:
        parts = [f"{self.prefill}P{self.decode}D"] if self.prefill or self.decode else []
        parts += [f"{self.aggregated} aggregated"] if self.aggregated else []
        return " + ".join(parts) or "no worker"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a decision, told by who carried it out and by the next window."""

    at: float  # unix seconds, of the latest news
    done: int = 0  # actions that succeeded
    failed: tuple[str, ...] = ()  # an error for each other one
    attained: float = NAN  # share of requests that kept to the objectives in the window after it


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tick. `actions` is what is to be done, or in the mode advise what would be."""

    number: int
    at: float  # unix seconds
    model: str = ""
    mode: Mode = "advise"
    window: Window
    forecast: Forecast = Forecast()
    have: dict[Role, int] = {}  # workers that are ready
    coming: dict[Role, int] = {}  # workers that start
    most: int = 0  # GPUs of the workers that there were at once, as far as planners remember
    needed: int = 0  # GPUs of the smallest deployment that would do
    options: tuple[Option, ...] = ()
    chosen: Option | None = None
    actions: tuple[Action, ...] = ()
    reason: str  # in plain words
    shed: float = 0.0  # part of the arrivals that routers are to refuse from now on
    held: str = ""  # why nothing is done although something else would be better; empty: nothing was held back
    corrections: dict[str, float] = {}  # measured over predicted, by which predictions are scaled
    start_seconds: float = NAN  # that workers were seen to take to start, at the least; NaN: none was seen yet
    outcome: Outcome | None = None


def to_line(decision: Decision) -> bytes:
    """One line of JSON, with its end. NaN becomes null."""
    return msgspec.json.encode(decision) + b"\n"


def from_line(line: bytes) -> Decision:
    """Raises msgspec.ValidationError or msgspec.DecodeError for what is no decision."""
    return msgspec.convert(_without_null(msgspec.json.decode(line)), Decision)


def latest(lines: Iterable[bytes]) -> list[Decision]:
    """Decisions of a log, the last line of each number; a last line that a crash cut off is left out."""
    found: dict[int, Decision] = {}
    for line in lines:
        try:
            decision = from_line(line)
        except msgspec.DecodeError:
            continue
        found[decision.number] = decision
    return [found[number] for number in sorted(found)]


def _without_null(value: Any) -> Any:
    """JSON has no NaN: what is null was not measured, and gets its default."""
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [math.nan if each is None else _without_null(each) for each in value]
    return value
