"""The planner in a simulated cluster: its own code sees windows of what happens, and its actions are carried out."""

from typing import Protocol

import numpy as np

from planner.decision import Decision
from planner.simulator.cluster import Cluster, Flight
from planner.simulator.demand import Demand
from planner.window import NAN, Pools, Window


class Decides(Protocol):
    """A `Controller`, or what it is compared with."""

    def decide(self, window: Window, pools: Pools, now: float) -> Decision:
        """What to do now."""
        ...


class Autopilot:
    """Looks every `interval` seconds until all requests are over. `gpus`: the budget, one a worker. Objectives `ttft`
    and `tpot` in seconds.
    """

    def __init__(
        self, cluster: Cluster, planner: Decides, *, interval: float, gpus: int, ttft: float, tpot: float
    ) -> None:
        self.decisions: list[Decision] = []
        self._cluster, self._planner, self._interval, self._gpus = cluster, planner, interval, gpus
        self._ttft, self._tpot = ttft, tpot
        self._came: list[Demand] = []  # since the last look
        self._ended: list[Flight] = []
        cluster.on_come = self._came.append
        cluster.on_end = self._ended.append
        cluster.clock.at(interval, self._look)

    @property
    def actions(self) -> int:
        """Carried out so far."""
        return sum(len(decision.actions) for decision in self.decisions if decision.mode == "act")

    def _look(self) -> None:
        cluster, now = self._cluster, self._cluster.clock.now
        if cluster.done:
            return
        window = self._window()
        pools = Pools(workers=tuple(cluster.members.there()), gpus=self._gpus)
        decision = self._planner.decide(window, pools, now)
        self.decisions.append(decision)
        if decision.mode == "act":
            cluster.shed = decision.shed
        for action in decision.actions if decision.mode == "act" else ():
            match action.kind:
                case "add":
                    assert action.role is not None
                    cluster.members.add(action.role)
                case "remove":
                    cluster.members.remove(int(action.worker))
                case "flip":
                    assert action.role is not None
                    cluster.members.flip(int(action.worker), action.role)
        cluster.clock.after(self._interval, self._look)

    def _window(self) -> Window:
        cluster, came, ended = self._cluster, self._came, self._ended
        rates = [
            cluster.workers[int(worker.name)].prefill_rate.per_second
            for worker in cluster.members.there()
            if worker.role == "prefill" and worker.state == "ready"
        ]
        told = [rate for rate in rates if rate == rate]
        prompt = _mean([demand.prompt_tokens for demand in came])
        window = Window(
            at=cluster.clock.now,
            seconds=self._interval,
            arrivals=float(len(came)),
            queued=float(cluster.queued),
            prompt_tokens=prompt,
            cached_tokens=prompt * _ratio(ended),
            output_tokens=_mean([flight.demand.output_tokens for flight in ended]),
            ttft=_quantile([flight.ttft for flight in ended]),
            tpot=_quantile([flight.tpot for flight in ended]),
            attained=_mean([flight.ttft <= self._ttft and flight.tpot <= self._tpot for flight in ended]),
            prefill_rate=_mean(told),
        )
        came.clear()
        ended.clear()
        return window


def _mean(values: list[int] | list[float] | list[bool]) -> float:
    return float(np.mean(values)) if values else NAN


def _quantile(values: list[float]) -> float:
    return float(np.percentile(values, 90)) if values else NAN


def _ratio(ended: list[Flight]) -> float:
    """Share of prompt tokens that nobody had to compute."""
    tokens = sum(flight.demand.prompt_tokens for flight in ended)
    return sum(flight.cached_tokens for flight in ended) / tokens if tokens else NAN
