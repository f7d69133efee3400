"""What happens between Ray's answer and the next look at it; the rest is tested on a Ray cluster (tests/cluster)."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray")

from services import ray_workers
from services.ray_plan import RayPlan, RayWorkerPlan
from services.ray_workers import RayWorkers, _Place


class Nodes:
    """Ray, whose nodes have what workers need. `made`: actors."""

    def __init__(self) -> None:
        self.made = 0

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls, []

    def remote(self, what: Any, *_: Any) -> Any:
        self.made += 1
        return self

    def options(self, **_: Any) -> Any:
        return self


async def test_who_is_wished_away_while_its_node_is_looked_at_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RayWorkerPlan("decode-1", "decode", "tiny", {})
    nodes, stop, loop = Nodes(), asyncio.Event(), asyncio.get_running_loop()
    workers = RayWorkers(RayPlan("", "spread", []), lambda model: "")
    place = _Place(None, 0, {"CPU": 1}, stays=True)  # type: ignore[arg-type]
    workers._workers["decode-1"] = ray_workers._Worker(plan, place, "look")

    def answer(call: Any, name: str) -> str:
        """In another thread, while the planner's wish is followed in the loop's."""
        loop.call_soon_threadsafe(workers.end, name)
        return ""

    monkeypatch.setattr(ray_workers, "ray", nodes)
    monkeypatch.setattr(ray_workers, "_answer", answer)
    loop.call_later(0.2, stop.set)
    await asyncio.wait_for(workers.watch(stop), 5)
    assert not nodes.made and not workers.models and workers._free == [place]
