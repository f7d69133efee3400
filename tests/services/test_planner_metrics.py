"""B247: what the planner's gauges say is what its latest decision was."""

from typing import Any

import msgspec

from planner.control import Controller, ControlSettings
from planner.window import ROLES, Pools, Window, Worker
from services.planner.metrics import PlannerMetrics


def test_b247_gauges_are_those_of_the_decision() -> None:
    metrics = PlannerMetrics()
    workers = [Worker(name=f"w{each}", role=role) for each, role in enumerate(("prefill", "decode", "decode"))]
    controller = Controller(ControlSettings(model="m", mode="act", ttft=1.0, tpot=0.05, interval=20.0))

    def value(name: str, **labels: str) -> Any:
        return metrics.registry.get_sample_value(f"tandem_planner_{name}", labels | {"model": "m"})

    shed = set()
    for tick, rate in enumerate((5.0, 20.0, 200.0, 200.0, 5.0)):
        window = Window(at=20.0 * tick, seconds=20.0, arrivals=20 * rate, prompt_tokens=2000.0, output_tokens=200.0)
        window = msgspec.structs.replace(window, queued=0.0, attained=0.5, cached_tokens=0.0)
        decision = controller.decide(window, Pools(workers=tuple(workers), gpus=3), window.at)
        metrics.decided(decision)
        assert decision.chosen is not None
        for role in ROLES:
            assert value("replicas", kind="desired", role=role) == decision.chosen.count(role)
            assert value("replicas", kind="actual", role=role) == decision.have[role]
        assert value("attainment", kind="predicted") == decision.chosen.attainment
        assert value("attainment", kind="measured") == 0.5
        assert value("arrivals", kind="measured") == rate
        assert value("arrivals", kind="mean") == decision.forecast.arrivals.mean
        assert value("arrivals", kind="upper") == decision.forecast.arrivals.upper
        assert value("shed") == decision.shed
        shed.add(decision.shed)
    assert len(shed) > 1
